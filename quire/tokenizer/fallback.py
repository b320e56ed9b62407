"""Tokenizers that come without a tokenizer.json, loaded by transformers, which is imported only for them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers

# transformers needs at least one of these.
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.*", "vocab.*", "merges.txt", "*.model", "*.tiktoken")
REMEDY = (
    "Name another tokenizer with --tokenizer, or save this one as tokenizer.json with transformers' save_pretrained."
)


def load_with_transformers(folder: Path, chat_template: str | None, slow: bool = False) -> Tokenizer:
    """Load the folder's files with AutoTokenizer; code that comes with a model is never run."""
    if not any(next(folder.glob(pattern), None) for pattern in TOKENIZER_FILES):
        raise ValueError(f"{folder} has no tokenizer.json and no other tokenizer files. {REMEDY}")
    # Reading from a device or a pipe may block forever.
    special = [entry.name for entry in folder.iterdir() if entry.exists() and not (entry.is_file() or entry.is_dir())]
    if special:
        raise ValueError(f"{folder / min(special)} is not a regular file; replace it by one")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError(
            f"{folder} has no tokenizer.json, and its other tokenizer files need transformers: "
            f"pip install transformers. {REMEDY}"
        ) from error
    try:
        loaded = AutoTokenizer.from_pretrained(
            str(folder), use_fast=not slow, trust_remote_code=False, local_files_only=True
        )
    except (ImportError, OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:400]
        raise ValueError(
            f"{folder} has no tokenizer.json, and transformers cannot load its tokenizer: {reason}. {REMEDY}"
        ) from error
    # Some classes accept a missing vocabulary and build one from a few special tokens.
    wanted = set((getattr(loaded, "vocab_files_names", None) or {}).values())
    if wanted and not any((folder / name).is_file() for name in wanted):
        raise ValueError(f"{folder} has none of the files of its tokenizer: {', '.join(sorted(wanted))}. {REMEDY}")
    return Tokenizer(
        loaded.backend_tokenizer if loaded.is_fast and not slow else SlowBackend(loaded),
        bos_token_id=loaded.bos_token_id,
        eos_token_id=loaded.eos_token_id,
        pad_token_id=loaded.pad_token_id,
        chat_template=chat_template or loaded.chat_template,
    )


class Encoding(NamedTuple):
    ids: list[int]
    type_ids: Sequence[int] = ()


class SlowBackend:
    """A slow (Python) tokenizer of transformers, with the part of `tokenizers.Tokenizer`'s interface that we use."""

    decoder = None  # not known to concatenate tokens: the detokenizer decodes windows of them

    def __init__(self, slow: Any):
        self._slow = slow
        self._size = len(slow)

    def no_truncation(self) -> None:
        pass  # an argument of each encode

    def no_padding(self) -> None:
        pass

    def get_vocab_size(self, with_added_tokens: bool = True) -> int:
        return self._size

    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]:
        return dict(self._slow.get_vocab())

    def get_added_tokens_decoder(self) -> dict[int, "tokenizers.AddedToken"]:
        from tokenizers import AddedToken

        special = zip(self._slow.all_special_ids, self._slow.all_special_tokens, strict=True)
        return {token_id: AddedToken(str(token), special=True) for token_id, token in special}

    def encode(self, text: str, add_special_tokens: bool = True) -> Encoding:
        if not isinstance(text, str):
            raise TypeError(type(text).__name__)
        text.encode()  # a lone surrogate is an error here, not somewhere in a Python tokenizer
        ids = self._slow.encode(text, add_special_tokens=add_special_tokens, padding=False, truncation=False)
        return Encoding(ids)

    def encode_batch_fast(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[Encoding]:
        return [self.encode(text, add_special_tokens) for text in texts]

    def encode_batch(self, pairs: Sequence[tuple[str, str]], add_special_tokens: bool = True) -> list[Encoding]:
        found = [
            self._slow(text, pair, add_special_tokens=add_special_tokens, return_token_type_ids=True)
            for text, pair in pairs
        ]
        return [Encoding(one["input_ids"], one["token_type_ids"]) for one in found]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        known = [token_id for token_id in ids if 0 <= token_id < self._size]
        return str(
            self._slow.decode(known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        )

    def id_to_token(self, token_id: int) -> str | None:
        return self._slow.convert_ids_to_tokens(token_id) if 0 <= token_id < self._size else None

    def token_to_id(self, token: str) -> int | None:
        return self._slow.get_vocab().get(token)
