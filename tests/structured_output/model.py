"""A tiny random model with a tokenizer that can write anything: all bytes, and some words made of several."""

from pathlib import Path
from typing import Any

from quire import LLM
from quire.checkpoint.resolve import resolve_model
from quire.structured_output.vocabulary import Vocabulary
from quire.tokenizer.load import load_tokenizer
from tests.tiny_models import save_tiny

END = "<|end|>"
WORDS = ['{"', '":', '", "', "true", "false", "null", "name", "  ", "ab", "12", "é", "}}", '"}', "\n\n"]


def save_model(folder: Path, initializer_range: float = 0.05, family: str = "llama", **changes: object) -> str:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([word * 3 for word in WORDS] * 20, trainer)
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    vocab = tokenizer.get_vocab_size()
    padded = vocab + 13  # ids that the tokenizer does not know, as padded models have
    end = tokenizer.token_to_id(END)
    given = {"vocab_size": padded, "eos_token_id": end, "initializer_range": initializer_range}
    save_tiny(family, folder, **given | changes)
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


def vocabulary_of(tiny: str) -> Vocabulary:
    tokenizer = load_tokenizer(resolve_model(tiny))
    [end] = tokenizer.encode(END, add_special_tokens=False)
    return Vocabulary(tokenizer, tokenizer.vocab_size + 13, (end,))


def open_engine(tiny: str, **options: Any) -> LLM:
    """Room for 64 requests of 256 tokens. One thread is enough for so small a model."""
    options = {"num_gpu_blocks_override": 1100, "max_num_seqs": 64, "cpu_threads": 1} | options
    return LLM(tiny, dtype="float32", max_model_len=256, use_tqdm_on_load=False, **options)
