"""JSON of a model's folder: whatever a file holds, what is wrong with it is a ValueError that names it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_BYTES = 256 * 2**20  # the largest tokenizer.json has 40 MiB


def read_json(file: Path) -> dict[str, Any] | None:
    """A JSON object; None where there is no such file."""
    if not file.is_file():
        return None
    if (size := file.stat().st_size) > MAX_BYTES:
        raise ValueError(f"{file} has {size} bytes; at most {MAX_BYTES} are read of a JSON file")
    return parse_object(file.read_bytes(), f"{file}")


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
