"""Incremental JSON: emits the text as it is validated, and fails at the first invalid character."""

import json
import re
from typing import Any

from quire.entrypoints.parsers.tools.reader import Emit, Malformed, Reader, Reading, Truncated

MAX_DEPTH = 128
DIGITS = "0123456789"
SOME_DIGITS = re.compile(r"[0-9]+")
PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
UNCLOSED = re.compile(r'"(?:[^"\\]|\\.)*\\?', re.DOTALL)
ESCAPES = tuple(f"\\{char}" for char in '"\\/bfnrtu')
HEX_DIGITS = "0123456789abcdefABCDEF"
CLOSES = {"{": "}", "[": "]"}


def value(reader: Reader, emit: Emit) -> Reading[None]:
    """One value, its text unchanged except that control characters in strings are escaped, which models omit."""
    try:
        yield from _value(reader, emit)
    except Truncated:
        emit(reader.consume(len(reader.text) - reader.at))
        raise


def _value(reader: Reader, emit: Emit) -> Reading[None]:
    closers: list[str] = []
    while True:
        yield from reader.space(emit)
        char = yield from reader.peek()
        opened = False
        if char in CLOSES:
            if len(closers) == MAX_DEPTH:
                raise Malformed
            emit(reader.consume(1))
            closers.append(CLOSES[char])
            yield from reader.space(emit)
            opened = (yield from reader.peek()) != closers[-1]
            if opened and char == "{":
                yield from key(reader, emit)
        elif char == '"':
            yield from string(reader, emit)
        else:
            yield from scalar(reader, emit)
        if opened:
            continue
        while closers:
            yield from reader.space(emit)
            char = yield from reader.peek()
            if char == closers[-1]:
                closers.pop()
                emit(reader.consume(1))
            elif char == ",":
                emit(reader.consume(1))
                if closers[-1] == "}":
                    yield from key(reader, emit)
                break
            else:
                raise Malformed
        else:
            return


def key(reader: Reader, emit: Emit) -> Reading[None]:
    yield from reader.space(emit)
    yield from string(reader, emit)
    yield from reader.space(emit)
    emit((yield from reader.expect(":")))


def string(reader: Reader, emit: Emit) -> Reading[None]:
    emit((yield from reader.expect('"')))
    while True:
        char = yield from reader.peek()
        if char == '"':
            emit(reader.consume(1))
            return
        if char == "\\":
            yield from escape(reader, emit)
        elif char < " ":
            emit(json.dumps(reader.consume(1))[1:-1])
        else:
            match = PLAIN.match(reader.text, reader.at)
            assert match is not None
            emit(reader.consume(len(match[0])))


def escape(reader: Reader, emit: Emit) -> Reading[None]:
    begun = yield from reader.expect(*ESCAPES)
    emit(begun)
    for _ in range(4 if begun == "\\u" else 0):
        if (yield from reader.peek()) not in HEX_DIGITS:
            raise Malformed
        emit(reader.consume(1))


def scalar(reader: Reader, emit: Emit) -> Reading[None]:
    char = yield from reader.peek()
    if char in "-0123456789":
        yield from number(reader, emit)
    else:
        emit((yield from reader.expect("true", "false", "null")))


def number(reader: Reader, emit: Emit) -> Reading[None]:
    emit((yield from reader.has("-")))
    if zero := (yield from reader.has("0")):
        emit(zero)
    else:
        yield from digits(reader, emit)
    if point := (yield from reader.has(".")):
        emit(point)
        yield from digits(reader, emit)
    if exponent := (yield from reader.has("e", "E")):
        emit(exponent)
        emit((yield from reader.has("-", "+")))
        yield from digits(reader, emit)


def digits(reader: Reader, emit: Emit) -> Reading[None]:
    if (yield from reader.peek()) not in DIGITS:
        raise Malformed
    while (yield from reader.peek()) in DIGITS:
        match = SOME_DIGITS.match(reader.text, reader.at)
        assert match is not None
        emit(reader.consume(len(match[0])))


def short_string(reader: Reader, longest: int) -> Reading[str]:
    """A whole string, decoded."""
    text = yield from reader.match(UNCLOSED, longest)
    text += yield from reader.expect('"')
    return str(loads(text))


def loads(text: str) -> Any:
    """Malformed also for what Python accepts beyond JSON (NaN) and for what nests too deeply for it."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise Malformed from None


def _refuse(constant: str) -> None:
    raise ValueError(constant)
