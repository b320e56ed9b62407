"""Finds the end-of-text token in a folder's tokenizer files, without loading a tokenizer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.checkpoint.json_file import read_json
from quire.config.values import whole_number


def tokenizer_eos_id(folder: Path) -> int | None:
    """The id of `eos_token`, or None if the files do not define it."""
    config = read_json(folder / "tokenizer_config.json") or {}
    token = config.get("eos_token") or (read_json(folder / "special_tokens_map.json") or {}).get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    if not isinstance(token, str):
        return None
    try:
        # Lazily, since the last files are large.
        found = next((ids[token] for ids in _vocabularies(folder, config) if token in ids), None)
        return None if found is None else whole_number(f"the id of {token!r}", found, minimum=0)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise ValueError(f"{folder} has tokenizer files that are malformed: {error!r}") from error


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
