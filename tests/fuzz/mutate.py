"""Mutations of valid inputs: JSON values, text and bytes."""

import json
import random
from collections.abc import Sequence
from typing import Any


class Raw(str):
    """Written into JSON verbatim."""


class Pairs(list[tuple[str, Any]]):
    """An object that may have duplicate keys."""


def nested(levels: int, opening: str = "[", closing: str = "]") -> Raw:
    return Raw(opening * levels + closing * levels)


NASTY: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 0.5, "", "x", [], {}, [None], [[]], {"": None}),
    *(2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 2**70, -(2**63), -(2**70), 10**300),
    *(Raw("1e999"), Raw("-1e999"), Raw("NaN"), Raw("Infinity"), Raw("1e-400"), Raw("1.0"), Raw("-0"), Raw("0x10")),
    *(Raw("1" * 5000), Raw("0." + "1" * 5000), Raw("tru"), Raw("'x'"), Raw("01"), Raw("")),
    *(Raw('"\\ud800"'), Raw('"\\udc00\\ud800"'), Raw('"\\u0000"'), Raw('"\\x"'), "\x00", "\u202e", "é" * 50, "😀" * 20),
    *("x" * 1000, "x" * 100_000, "a b " * 5000, "\n" * 3000, " ", "\ufffd", "null", "../../etc/passwd", "{{ 7*7 }}"),
    *(nested(50), nested(5000), Raw('{"a":' * 2000 + "1" + "}" * 2000)),
    *([0] * 100, [0] * 20_000, ["x"] * 3000, [2**70] * 10, [-1], ["", ""], {str(i): i for i in range(2000)}),
)


def dumps(value: Any) -> str:
    """JSON, including invalid JSON."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{json.dumps(key)}:{dumps(item)}" for key, item in value) + "}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{dumps(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(dumps, value)) + "]"
    return json.dumps(value)


def mutated_value(rng: random.Random, value: Any, words: Sequence[Any] = NASTY) -> Any:
    """A copy with one mutation: replaced, removed, duplicated, repeated, or wrapped."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        items = dict(value)
        key = rng.choice(list(items))
        match rng.randrange(12):
            case 0:
                del items[key]
            case 1:
                return Pairs([*items.items(), (key, rng.choice(words))])
            case 2:
                items[rng.choice(["unknown", key + "s", key.upper(), "", "\x00", "__class__", "x" * 300])] = items[key]
            case _:
                items[key] = mutated_value(rng, items[key], words)
        return items
    if isinstance(value, list) and value and rng.random() < 0.8:
        items = list(value)
        at = rng.randrange(len(items))
        match rng.randrange(8):
            case 0:
                del items[at]
            case 1:
                items = items * rng.choice([2, 50, 1000 if len(items) < 8 else 3])
            case 2:
                items.insert(at, rng.choice(words))
            case _:
                items[at] = mutated_value(rng, items[at], words)
        return items
    match rng.randrange(8):
        case 0:
            return [value] * rng.choice([0, 1, 2, 100])
        case 1:
            return {rng.choice(["a", "type", "$ref", ""]): value}
        case 2 if isinstance(value, str):
            return mutated_text(rng, value, [word for word in words if type(word) is str])
        case 3 if isinstance(value, int | float):
            return rng.choice([-value, value + 1, value * 10**6, value / 3, str(value)])
        case _:
            return rng.choice(words)


def mutated_text(rng: random.Random, text: str, words: Sequence[str]) -> str:
    """A few spans removed, repeated, moved, or replaced by one of the words."""
    for _ in range(rng.choice([1, 1, 2, 4])):
        begin, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        end = min(end, begin + rng.choice([1, 4, 20, 200]))
        match rng.randrange(6):
            case 0:
                text = text[:begin] + text[end:]
            case 1:
                text = text[:end] + text[begin:end] * rng.choice([1, 2, 30]) + text[end:]
            case 2:
                at = rng.randrange(len(text) + 1)
                text = text[:at] + text[begin:end] + text[at:]
            case 3:
                text = text[:begin] + chr(rng.choice([0, 10, 34, 39, 92, 123, 125, 0x7F, 0xE9, 0x2028])) + text[end:]
            case _:
                text = text[:begin] + (rng.choice(words) if words else "") + text[rng.choice([begin, end]) :]
    return text


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    """A few bytes changed, removed or repeated."""
    for _ in range(rng.choice([1, 1, 3])):
        at = rng.randrange(len(data) + 1)
        length = rng.choice([1, 2, 8, 64])
        match rng.randrange(5):
            case 0:
                data = data[:at]
            case 1:
                data = data[:at] + data[at + length :]
            case 2:
                data = data[:at] + data[at : at + length] * rng.choice([2, 10]) + data[at + length :]
            case 3:
                data = data[:at] + rng.randbytes(length) + data[at + length :]
            case _:
                junk = rng.choice([b"\x00", b"\xff", b"\xed\xa0\x80", b"\xc3", b"\xef\xbb\xbf", b"\r\n", b"\\u"])
                data = data[:at] + junk + data[at:]
    return data
