"""Tiny vocabularies of each family."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from quire.checkpoint.gguf_header import GGUFHeader
from quire.tokenizer import Tokenizer
from quire.tokenizer.gguf import build_gguf_tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "hello world, hello there",
    "naïve café 你好 世界",
    "print('x' * 12)",
]
CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def save_byte_level(folder: Path) -> Path:
    """A trained byte-level BPE with a BOS post-processor, saved as a Hugging Face folder."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|bos|>", "<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS * 4, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", 0)]
    )
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|bos|>", "eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


SPM_PIECES = [
    "▁",
    "h",
    "e",
    "l",
    "o",
    "w",
    "r",
    "d",
    "▁▁",
    "he",
    "ll",
    "hell",
    "hello",
    "▁hello",
    "▁w",
    "or",
    "ld",
    "▁world",
]


def sentencepiece(**changes: Any) -> Tokenizer:
    """A Llama-like SentencePiece vocabulary as GGUF metadata: <unk> <s> </s>, 256 bytes, then pieces, best first."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SPM_PIECES, "<tool>"]
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(SPM_PIECES), 4],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(SPM_PIECES))] + [0.0],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return build_gguf_tokenizer(GGUFHeader(Path("tiny.gguf"), values | changes, {}))
