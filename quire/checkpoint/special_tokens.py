"""The end-of-text token as a folder's tokenizer files name it, found without loading a tokenizer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.checkpoint.config import read_json


def tokenizer_eos_id(folder: Path) -> int | None:
    """The id of `eos_token`, or None where the files do not say."""
    config = read_json(folder / "tokenizer_config.json") or {}
    token = config.get("eos_token") or (read_json(folder / "special_tokens_map.json") or {}).get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    if not isinstance(token, str):
        return None
    # One after the other, since the last ones are large.
    return next((ids[token] for ids in _vocabularies(folder, config) if token in ids), None)


def _vocabularies(folder: Path, config: dict[str, Any]) -> Iterator[dict[str, int]]:
    listed = config.get("added_tokens_decoder") or {}
    yield {fields["content"]: int(token_id) for token_id, fields in listed.items()}
    yield read_json(folder / "added_tokens.json") or {}
    tokenizer = read_json(folder / "tokenizer.json") or {}
    yield {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
    vocab = (tokenizer.get("model") or {}).get("vocab") or {}
    # Unigram models list [token, score] in the order of ids.
    yield vocab if isinstance(vocab, dict) else {entry[0]: token_id for token_id, entry in enumerate(vocab)}
    yield read_json(folder / "vocab.json") or {}
