"""Validation of user input. Each check raises a ValueError that names the field, the value and what is allowed; values
that pass can be sent to another process."""

import itertools
import math
from typing import Any

from quire.config.shown import shown

MAX_TOKEN_ID = 2**31 - 1
MAX_INT = 2**63 - 1
MAX_LOGIT_BIAS = 1024
MAX_CANDIDATES = 1 << 24  # token ids to score, of all positions of a prompt
MAX_PLAIN_DEPTH = 32  # of nested lists and mappings
MAX_PLAIN_VALUES = 1 << 16
MAX_PLAIN_CHARACTERS = 1 << 20  # of all strings in it together


def check(ok: bool, name: str, value: Any, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name} is {shown(value)}; it must be {allowed}")


def check_bool(name: str, value: Any) -> None:
    check(isinstance(value, bool), name, value, "true or false")


def check_int(name: str, value: Any, low: int, high: int, allowed: str | None = None) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    check(ok, name, value, allowed or f"a whole number between {low} and {high}")


def check_finite(name: str, value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not (abs(value) <= MAX_INT if isinstance(value, int) else math.isfinite(value)):
        raise ValueError(f"{name} must be a finite number, got {shown(value)}")


def check_count(name: str, values: Any, most: int) -> None:
    if len(values) > most:
        raise ValueError(f"{name} has {len(values)} entries; at most {most} are allowed")


def check_tokens(name: str, values: Any, most: int) -> None:
    check(isinstance(values, list), name, values, "a list of token ids")
    check_count(name, values, most)
    for token in values:
        check_int(name, token, 0, MAX_TOKEN_ID, "token ids of 0 or more")


def check_text(name: str, text: Any, longest: int) -> None:
    check(isinstance(text, str), name, text, "a text")
    if len(text) > longest:
        raise ValueError(f"{name} has {len(text)} characters; at most {longest} are allowed")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name} is not valid Unicode: it holds half of a surrogate pair") from None


def check_plain(name: str, value: Any) -> None:
    """JSON-like values of bounded size: numbers, strings, lists, mappings."""
    level, num_values, num_characters = [value], 0, 0
    for _ in range(MAX_PLAIN_DEPTH + 1):
        below: list[Any] = []
        for part in level:
            if isinstance(part, (dict, list, tuple)):
                num_values += 2 * len(part) if isinstance(part, dict) else len(part)
                if num_values > MAX_PLAIN_VALUES:  # before any copy is made
                    raise ValueError(f"{name} has more than {MAX_PLAIN_VALUES} values in it")
            if isinstance(part, dict):
                if not all(isinstance(key, str) for key in part):
                    raise ValueError(f"{name} has a mapping whose keys are not all strings")
                below += part.keys()
                below += part.values()
            elif isinstance(part, (list, tuple)):
                below += part
            elif isinstance(part, str):
                check_text(name, part, MAX_PLAIN_CHARACTERS)
                num_characters += len(part)
                if num_characters > MAX_PLAIN_CHARACTERS:
                    raise ValueError(f"{name} has more than {MAX_PLAIN_CHARACTERS} characters in it")
            elif isinstance(part, int):
                check(abs(part) <= MAX_INT, name, part, "without whole numbers of more than 64 bits")
            elif part is not None and not isinstance(part, float):
                raise ValueError(
                    f"{name} has a {type(part).__name__}; it may hold strings, numbers, true, false, None, lists and "
                    "mappings"
                )
        if not below:
            return
        level = below
    raise ValueError(f"{name} is nested more than {MAX_PLAIN_DEPTH} levels deep")


def as_list(name: str, values: Any, most: int) -> list[Any]:
    """A copy as a list of at most `most` entries."""
    if isinstance(values, (str, bytes, dict)) or not hasattr(values, "__iter__"):
        raise ValueError(f"{name} is {shown(values)}; it must be a list")
    if not hasattr(values, "__len__"):
        values = list(itertools.islice(values, most + 1))
    check_count(name, values, most)
    return list(values)


def as_rows(name: str, values: Any) -> list[list[int]]:
    """One list of token ids for each position, also of an array; -1 stands for none."""
    rows = values.tolist() if hasattr(values, "tolist") else as_list(name, values, MAX_TOKEN_ID)
    if not all(isinstance(row, (list, tuple)) or hasattr(row, "tolist") for row in rows):
        raise ValueError(f"{name} must have a list of token ids for each position that is scored")
    rows = [list(row.tolist() if hasattr(row, "tolist") else row) for row in rows]
    if sum(map(len, rows)) > MAX_CANDIDATES:
        raise ValueError(f"{name} has {sum(map(len, rows))} token ids; at most {MAX_CANDIDATES} are allowed")
    if not all(type(token) is int and -1 <= token <= MAX_TOKEN_ID for row in rows for token in row):
        raise ValueError(f"{name} has an entry that is no token id; entries must be 0 or more, or -1 for none")
    return rows


def as_bias(values: Any) -> dict[int, float]:
    """JSON keys are strings: "5" counts as 5."""
    if not isinstance(values, dict):
        raise ValueError(f"logit_bias is {shown(values)}; it must be a mapping of token ids to numbers")
    check_count("logit_bias", values, MAX_LOGIT_BIAS)
    try:
        return {int(token) if isinstance(token, str) else token: bias for token, bias in values.items()}
    except ValueError:
        raise ValueError("logit_bias has a key that is not a token id; it must map token ids to numbers") from None
