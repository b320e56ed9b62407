"""Reads JSON files of a model's folder; any error in one is a ValueError that names it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_BYTES = 256 * 2**20  # the largest tokenizer.json has 40 MiB


def read_json(file: Path) -> dict[str, Any] | None:
    """A JSON object; None if the file does not exist."""
    return parse_object(file.read_bytes(), f"{file}") if is_readable(file) else None


def is_readable(file: Path) -> bool:
    """Whether the file exists. ValueError if it is not a regular file (reading may never end) or too large."""
    if not file.is_file():
        if file.exists():
            raise ValueError(f"{file} is not a regular file; replace it by one")
        return False
    if (size := file.stat().st_size) > MAX_BYTES:
        raise ValueError(f"{file} has {size} bytes; at most {MAX_BYTES} are read of a JSON file")
    return True


def parse_object(text: bytes, source: str, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The JSON object in `text`; `pairs` makes its objects, as for json.loads."""
    try:
        content = json.loads(text, object_pairs_hook=pairs)
    except RecursionError as error:
        raise ValueError(f"{source} is not valid JSON: it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{source} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{source} must hold a JSON object, not a {type(content).__name__}")
    return content
