"""Google's format: call:f{a:<escape>text<escape>,b:[1,{c:true}]}."""

import json
import re
from typing import ClassVar

from quire.entrypoints.parsers.tools.base import MAX_NAME
from quire.entrypoints.parsers.tools.json_text import MAX_DEPTH
from quire.entrypoints.parsers.tools.reader import Malformed, Reading, Truncated
from quire.entrypoints.parsers.tools.xml import NAME, TaggedParser, as_json, types_of

KEY = re.compile(r"[^:,{}\[\]<>\n]*")
WORD = re.compile(r"[^,{}\[\]<>\n]*")
MAX_WORD = 256  # characters of a number, or of what else stands without quotes
CLOSES = {"{": "}", "[": "]"}


class Gemma4Parser(TaggedParser):
    """<|tool_call>call:f{a:<|"|>text<|"|>}<tool_call|>"""

    opens = ("<|tool_call>",)
    closes = "<tool_call|>"
    quote: ClassVar[str] = '<|"|>'
    quotes_all: ClassVar[bool] = False  # numbers too: the schema tells what a quoted argument is
    markers = (*opens, closes, quote)

    def marked(self, marker: str) -> Reading[None]:
        reader = self.reader
        yield from reader.space()
        yield from reader.expect("call:")
        name = yield from reader.match(NAME, MAX_NAME)
        yield from reader.expect("{")
        if not name:
            raise Malformed
        self.call(name)
        yield from self.members(name)
        yield from reader.space()
        yield from reader.has(self.closes)

    def members(self, function: str) -> Reading[None]:
        """The rest of the arguments after their brace, as JSON."""
        reader, emit = self.reader, self.arguments
        closers = ["}"]
        emit("{")
        first = True
        while closers:
            yield from reader.space()
            if not first and (yield from reader.peek()) != closers[-1]:
                yield from reader.expect(",")
                yield from reader.space()
            if (yield from reader.has(closers[-1])):
                emit(closers.pop())
                first = False
                continue
            if not first:
                emit(", ")
            key = ""
            if closers[-1] == "}":
                key = yield from self.key()
                emit(f"{json.dumps(key, ensure_ascii=False)}: ")
            yield from reader.space()
            char = yield from reader.peek()
            first = char in CLOSES
            if not first:
                yield from self.value(function, key if len(closers) == 1 else None)
            elif len(closers) == MAX_DEPTH:
                raise Malformed
            else:
                emit(reader.consume(1))
                closers.append(CLOSES[char])

    def key(self) -> Reading[str]:
        reader = self.reader
        if (yield from reader.has(self.quote)):
            pieces: list[str] = []
            if not (yield from reader.until(self.quote, emit=pieces.append)):
                raise Truncated
            key = "".join(pieces)
        else:
            key = (yield from reader.match(KEY, MAX_NAME)).strip()
        yield from reader.space()
        yield from reader.expect(":")
        return key

    def value(self, function: str, argument: str | None) -> Reading[None]:
        """A text or a word; of an argument where `argument` is its name."""
        reader = self.reader
        if not (yield from reader.has(self.quote)):
            word = (yield from reader.match(WORD, MAX_WORD)).strip()
            if (yield from reader.at_end()):
                self.arguments(word)
                raise Truncated
            if not word:
                raise Malformed
            self.arguments(as_json(word, set()))
            return
        types = {"string"}
        if self.quotes_all and argument is not None:
            types = types_of(self.schemas.get(function, {}), argument)
        if types != {"string"}:
            pieces: list[str] = []
            closed = yield from reader.until(self.quote, emit=pieces.append)
            text = "".join(pieces)
            self.arguments(as_json(text, types) if closed else text)
        else:
            self.arguments('"')
            closed = yield from reader.until(self.quote, emit=self.quoted)
            self.arguments('"' if closed else "")
        if not closed:
            raise Truncated


class FunctionGemmaParser(Gemma4Parser):
    """<start_function_call>call:f{a:<escape>text<escape>}<end_function_call>"""

    opens = ("<start_function_call>",)
    closes = "<end_function_call>"
    quote = "<escape>"
    quotes_all = True
    markers = (*opens, closes, quote)
