"""Calls written as Python: [f(a=1), g(b="x")]."""

import json
import math
import re
from typing import ClassVar

from quire.entrypoints.parsers.tools.base import MAX_NAME, ToolParser
from quire.entrypoints.parsers.tools.json_text import HEX_DIGITS, MAX_DEPTH
from quire.entrypoints.parsers.tools.reader import Emit, Malformed, Reading, Truncated

MAX_NUMBER = 256  # characters
NAME = re.compile(r"(?:[^\W\d][\w.]*)?")
NUMBER = re.compile(r"[-+.\w]*")
PLAIN = {quote: re.compile(rf"[^{quote}\\]+") for quote in "'\""}
OCTAL = re.compile(r"[0-7]*")
WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": ""}
ESCAPES |= {char: char for char in "\\'\""}
HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}
CLOSES = {"[": "]", "(": ")", "{": "}"}


class PythonicParser(ToolParser):
    """The list starts the response, or follows <|python_start|>: Llama 3.2 and 4, and other models that write Python. A
    list at the start holds calls only if its functions were offered."""

    start: ClassVar[str] = "<|python_start|>"
    end: ClassVar[str] = "<|python_end|>"
    bare: ClassVar[bool] = True  # whether a list at the start of the response may hold calls
    markers = (start, end)

    def steps(self) -> Reading[None]:
        reader = self.reader
        if self.bare:
            yield from reader.space(self.content)
            if not (yield from reader.at_end()) and (yield from reader.peek()) == "[":
                yield from self.attempt(self.calls(marked=False))
        while marker := (yield from reader.until(self.start, emit=self.content)):
            yield from self.attempt(self.calls(marked=True), marker)

    def calls(self, marked: bool) -> Reading[None]:
        reader = self.reader
        yield from reader.space()
        yield from reader.expect("[")
        while True:
            yield from reader.space()
            name = yield from reader.match(NAME, MAX_NAME)
            if not name or not (marked or not self.schemas or name in self.schemas):
                raise Malformed
            yield from reader.expect("(")
            yield from self.keywords(name)
            yield from reader.space()
            reader.mark()
            if (yield from reader.expect(",", "]")) == "]":
                break
            yield from reader.space()
            if (yield from reader.has("]")):
                break
        yield from reader.space()
        if (yield from reader.has(self.end)):
            yield from reader.space()

    def keywords(self, function: str) -> Reading[None]:
        """a=1, b="x") as {"a": 1, "b": "x"}. Emits the call at its first keyword, or at its end."""
        reader = self.reader
        began = False
        while True:
            yield from reader.space()
            if (yield from reader.has(")")):
                break
            keyword = yield from reader.match(NAME, MAX_NAME)
            if not keyword:
                yield from reader.peek()
                raise Malformed
            yield from reader.space()
            yield from reader.expect("=")
            if not began:
                self.call(function)
            self.arguments((", " if began else "{") + json.dumps(keyword, ensure_ascii=False) + ": ")
            began = True
            yield from self.value()
            yield from reader.space()
            if (yield from reader.expect(",", ")")) == ")":
                break
        if not began:
            self.call(function)
        self.arguments("}" if began else "{}")

    def value(self) -> Reading[None]:
        try:
            yield from self._value()
        except Truncated:
            self.arguments(self.reader.consume(len(self.reader.text) - self.reader.at))
            raise

    def _value(self) -> Reading[None]:
        """A literal: strings, numbers, lists and tuples, dictionaries with strings as keys."""
        reader, emit = self.reader, self.arguments
        closers: list[str] = []
        first = False  # whether the next value would be its container's first
        while True:
            yield from reader.space()
            char = yield from reader.peek()
            closing = bool(closers) and char == closers[-1]
            if not closing:
                if closers and not first:
                    emit(", ")
                if closers and closers[-1] == "}":
                    yield from self.string(emit)
                    yield from reader.space()
                    yield from reader.expect(":")
                    yield from reader.space()
                    emit(": ")
                    char = yield from reader.peek()
                if char in CLOSES:
                    if len(closers) == MAX_DEPTH:
                        raise Malformed
                    reader.consume(1)
                    emit("{" if char == "{" else "[")
                    closers.append(CLOSES[char])
                    first = True
                    continue
                if char in "'\"":
                    yield from self.string(emit)
                else:
                    yield from self.word(emit)
            while closers:
                yield from reader.space()
                if (yield from reader.has(closers[-1])):
                    emit("}" if closers.pop() == "}" else "]")
                    continue
                yield from reader.expect(",")
                first = False
                break
            else:
                return

    def word(self, emit: Emit) -> Reading[None]:
        text = yield from self.reader.match(NUMBER, MAX_NUMBER)
        if text in WORDS:
            emit(WORDS[text])
            return
        number: float
        try:
            number = int(text)
        except ValueError:
            try:
                number = float(text)
            except ValueError:
                number = math.inf
        if not text or not math.isfinite(number):
            emit(text)
            raise Malformed
        emit(json.dumps(number))

    def string(self, emit: Emit) -> Reading[None]:
        reader = self.reader
        quote = yield from reader.expect('"', "'")
        emit('"')
        while True:
            char = yield from reader.peek()
            if char == quote:
                reader.consume(1)
                emit('"')
                return
            match = PLAIN[quote].match(reader.text, reader.at)
            if char == "\\":
                text = yield from self.escape()
            else:
                text = reader.consume(len(match[0]) if match is not None else 1)
            emit(json.dumps(text, ensure_ascii=False)[1:-1])

    def escape(self) -> Reading[str]:
        reader = self.reader
        yield from reader.expect("\\")
        if (yield from reader.at_end()):
            return "\\"
        char = yield from reader.peek()
        if char in "01234567":
            return chr(int((yield from reader.match_up_to(OCTAL, 3)), 8))
        reader.consume(1)
        if char not in HEX_LENGTHS:
            return ESCAPES.get(char, "\\" + char)
        digits = ""
        while len(digits) < HEX_LENGTHS[char]:
            if (yield from reader.at_end()) or (yield from reader.peek()) not in HEX_DIGITS:
                return f"\\{char}{digits}"
            digits += reader.consume(1)
        code = int(digits, 16)
        return chr(code) if code < 0xD800 or 0xE000 <= code < 0x110000 else f"\\{char}{digits}"


class Lfm2Parser(PythonicParser):
    """<|tool_call_start|>[f(a=1)]<|tool_call_end|>: LFM2."""

    start, end = "<|tool_call_start|>", "<|tool_call_end|>"
    bare = False
    markers = (start, end)


class Olmo3Parser(PythonicParser):
    """<function_calls>, a call on each line, </function_calls>: Olmo 3."""

    start, end = "<function_calls>", "</function_calls>"
    bare = False
    markers = (start, end)

    def calls(self, marked: bool) -> Reading[None]:
        reader = self.reader
        yield from reader.space()
        while True:
            name = yield from reader.match(NAME, MAX_NAME)
            if not name:
                raise Malformed
            yield from reader.expect("(")
            yield from self.keywords(name)
            yield from reader.space()
            reader.mark()
            if (yield from reader.at_end()) or (yield from reader.has(self.end)):
                return
            yield from reader.has(",")
            yield from reader.space()
