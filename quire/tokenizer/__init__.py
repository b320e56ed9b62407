"""Text to token ids and back: `load_tokenizer` for a checkpoint, `IncrementalDetokenizer` for a stream of tokens."""

from quire.tokenizer.detokenizer import IncrementalDetokenizer
from quire.tokenizer.load import load_tokenizer
from quire.tokenizer.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "Tokenizer", "load_tokenizer"]
