"""The tokenizer's vocabulary in the form that grammar libraries need."""

from functools import cached_property

from quire.checkpoint.resolve import resolve_model
from quire.config import EngineConfig
from quire.structured_output.backends.base import GrammarError
from quire.tokenizer.load import tokenizer_of
from quire.tokenizer.tokenizer import Tokenizer


class Vocabulary:
    """`tokens[i]` is what token i adds to the text, in bytes; empty for special tokens and for ids without a token."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """`vocab_size` is the model's, which may have more ids than the tokenizer has tokens."""
        if not eos_token_ids:
            raise GrammarError("this model has no end-of-sequence token, so a constrained output could never end")
        self.tokenizer = tokenizer
        self.size = vocab_size
        self.end_id = eos_token_ids[0]
        self.special_ids = sorted({*tokenizer.special_ids, *eos_token_ids})

    @cached_property
    def tokens(self) -> list[bytes]:
        known, special = self.tokenizer.vocab_size, set(self.special_ids)
        return [b"" if i in special or i >= known else self.tokenizer.token_bytes(i) for i in range(self.size)]

    @property
    def num_words(self) -> int:
        """int32 words of a mask."""
        return (self.size + 31) // 32

    @classmethod
    def of_engine(cls, config: EngineConfig) -> "Vocabulary":
        model = config.model
        checkpoint = resolve_model(
            model.model,
            load_format=config.load.load_format,
            revision=model.revision,
            download_dir=config.load.download_dir,
        )
        return cls(tokenizer_of(checkpoint, model), model.vocab_size, model.eos_token_ids)
