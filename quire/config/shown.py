"""Values in error messages: bounded, whatever was sent."""

import itertools
import re
from collections.abc import Iterable
from typing import Any

SHOWN_CHARACTERS = 200  # of a value in an error
SHOWN_BYTES = 1 << 14  # a larger collection is described, not printed
SHOWN_DEPTH = 32  # of nested lists and mappings
SHOWN_KEYS = 8


def shown(value: Any) -> str:
    """A value for an error message: truncated if long, described if it cannot be printed."""
    if isinstance(value, int) and value.bit_length() > 63:
        return f"a number of {value.bit_length()} bits"
    is_collection = isinstance(value, (list, tuple, dict, set))
    if is_collection and (len(value) > SHOWN_CHARACTERS or oversize_reason(value, SHOWN_BYTES, SHOWN_DEPTH)):
        return f"a {type(value).__name__} of {len(value)} entries"
    if isinstance(value, (str, bytes)) and len(value) > SHOWN_CHARACTERS:
        value = value[:SHOWN_CHARACTERS]
        return f"{value!r}..."
    try:
        text = repr(value)
    except Exception:  # e.g. an int inside with more digits than Python prints
        return f"a {type(value).__name__}"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def shown_keys(keys: Iterable[Any]) -> str:
    """The first few, sorted."""
    few = list(itertools.islice(keys, SHOWN_KEYS + 1))
    names = shown(sorted(few[:SHOWN_KEYS], key=shown))
    return f"{names} and more" if len(few) > SHOWN_KEYS else names


def without_passwords(value: Any) -> Any:
    """With what stands before the @ of URLs hidden, in nested values too."""
    if isinstance(value, str):
        return re.sub(r"://[^/\s]*@", "://hidden@", value)
    if isinstance(value, dict):
        return {key: without_passwords(part) for key, part in value.items()}
    return [without_passwords(part) for part in value] if isinstance(value, (list, tuple)) else value


def oversize_reason(value: Any, max_bytes: int, max_depth: int) -> str | None:
    """Why a value is too large as JSON, without encoding it; None if it may fit."""
    level, num_bytes = [value], 0
    for _ in range(max_depth + 1):
        below: list[Any] = []
        for part in level:
            if isinstance(part, str):
                num_bytes += len(part)
            elif isinstance(part, (dict, list, tuple)):
                num_bytes += 2 * len(part)  # each value has a character, and a comma or bracket
                if isinstance(part, dict) and num_bytes <= max_bytes:
                    num_bytes += sum(len(key) for key in part if isinstance(key, str))
                if num_bytes <= max_bytes:
                    below += part.values() if isinstance(part, dict) else part
            if num_bytes > max_bytes:
                return f"has at least {num_bytes} bytes; at most {max_bytes} are allowed"
        if not below:
            return None
        level = below
    return f"is nested more than {max_depth} levels deep"
