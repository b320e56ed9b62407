"""Formats that write a call as a JSON object: {"name": ..., "arguments": {...}}."""

from typing import ClassVar

from quire.entrypoints.parsers.tools import json_text
from quire.entrypoints.parsers.tools.base import MAX_NAME, ToolParser
from quire.entrypoints.parsers.tools.reader import Emit, Malformed, Reading

OTHER_KEYS = ("id", "type", "index")  # of a call; any other key means that an unmarked object is content


class JsonCallParser(ToolParser):
    """Parses call objects, one or a list."""

    name_key: ClassVar[str] = "name"
    argument_keys: ClassVar[tuple[str, ...]] = ("arguments", "parameters")
    id_key: ClassVar[str | None] = None  # whose text becomes the call's id

    def offered(self, name: str) -> bool:
        return not self.schemas or name in self.schemas

    def call_object(self, marked: bool = True) -> Reading[None]:
        yield from self.reader.expect("{")
        yield from self.call_members(marked)

    def call_members(self, marked: bool) -> Reading[None]:
        """The rest of an object after its brace. An object without a marker must match a call in every key."""
        reader = self.reader
        name = early = id = None
        began = False
        while True:
            yield from reader.space()
            key = yield from json_text.short_string(reader, MAX_NAME)
            yield from reader.space()
            yield from reader.expect(":")
            yield from reader.space()
            if key == self.name_key and name is None:
                name = yield from json_text.short_string(reader, MAX_NAME)
                if not name or not (marked or self.offered(name)):
                    raise Malformed
            elif key in self.argument_keys and not began and early is None:
                if name is not None:
                    yield from self.call_arguments(name, id)
                    began = True
                else:
                    pieces: list[str] = []
                    yield from arguments_object(self, pieces.append)
                    early = "".join(pieces)
            elif key == self.id_key and id is None and (yield from reader.peek()) == '"':
                id = (yield from json_text.short_string(reader, MAX_NAME)) or None
            elif marked or key in OTHER_KEYS:
                yield from json_text.value(reader, _ignore)
            else:
                raise Malformed
            if name is not None and early is not None and not began:
                self.call(name, id)
                self.arguments(early)
                began = True
            yield from reader.space()
            if (yield from reader.expect(",", "}")) == "}":
                break
        if began:
            return
        if name is None or not marked:
            raise Malformed
        self.call(name, id)
        self.arguments("{}")

    def call_arguments(self, name: str, id: str | None = None) -> Reading[None]:
        """Arguments of a call whose name is known; emits the call at their first character."""
        char = yield from self.reader.peek()
        if char == "{":
            self.call(name, id)
            yield from json_text.value(self.reader, self.arguments)
            return
        pieces: list[str] = []
        yield from arguments_object(self, pieces.append)
        self.call(name, id)
        self.arguments("".join(pieces))

    def call_list(self, marked: bool = True) -> Reading[None]:
        yield from self.reader.expect("[")
        yield from self.call_items(marked)

    def call_items(self, marked: bool) -> Reading[None]:
        """The rest of a list after its bracket."""
        reader = self.reader
        while True:
            yield from reader.space()
            yield from self.call_object(marked)
            yield from reader.space()
            reader.mark()
            if (yield from reader.expect(",", "]")) == "]":
                return


def arguments_object(parser: ToolParser, emit: Emit) -> Reading[None]:
    """An object, or what models write instead of one: null, or the object's text in a string."""
    char = yield from parser.reader.peek()
    if char == "{":
        yield from json_text.value(parser.reader, emit)
    elif char == '"':
        pieces: list[str] = []
        yield from json_text.string(parser.reader, pieces.append)
        inner = json_text.loads("".join(pieces))
        if not isinstance(json_text.loads(inner or "{}"), dict):
            raise Malformed
        emit(inner or "{}")
    else:
        yield from parser.reader.expect("null")
        emit("{}")


def _ignore(text: str) -> None:
    pass


class MarkedJsonParser(JsonCallParser):
    """Calls between markers, or from a marker to the end of the JSON."""

    opens: ClassVar[tuple[str, ...]]
    closes: ClassVar[str] = ""

    def steps(self) -> Reading[None]:
        marker = yield from self.reader.until(*self.opens, emit=self.content)
        while marker:
            before = self.num_calls
            whole = yield from self.attempt(self.marked(), marker)
            if not whole and self.num_calls > before and self.closes:
                # The call is malformed: the rest of it is content, except its closing marker.
                marker = yield from self.reader.until(self.closes, *self.opens, emit=self.content)
                if marker != self.closes:
                    continue
            marker = yield from self.reader.until(*self.opens, emit=self.content)

    def marked(self) -> Reading[None]:
        reader = self.reader
        yield from reader.space()
        while True:
            if (yield from reader.peek()) == "[":
                yield from self.call_list()
            else:
                yield from self.call_object()
            yield from reader.space()
            if self.closes and (yield from reader.has(self.closes)):
                return
            if (yield from reader.at_end()):
                return
            reader.mark()
            if (yield from reader.peek()) != "{":
                if self.closes:
                    raise Malformed
                return


class HermesParser(MarkedJsonParser):
    """<tool_call>{"name": "f", "arguments": {...}}</tool_call>: Hermes, Qwen 2.5 and 3, Granite 4 and many more."""

    opens = ("<tool_call>",)
    closes = "</tool_call>"
    markers = (*opens, closes)


class GraniteParser(MarkedJsonParser):
    """<|tool_call|>[{"name": "f", "arguments": {...}}], also without the marker: Granite 3."""

    opens = ("<|tool_call|>", "<tool_call>")
    closes = "</tool_call>"
    markers = (*opens, closes)

    def steps(self) -> Reading[None]:
        if not (yield from self.reader.at_end()):
            yield from self.reader.space(self.content)
            if not (yield from self.reader.at_end()) and (yield from self.reader.peek()) == "[":
                yield from self.attempt(self.call_list(marked=False))
        yield from super().steps()


class Granite20bParser(MarkedJsonParser):
    """<function_call> {"name": "f", "arguments": {...}}: Granite 20B function calling."""

    opens = markers = ("<function_call>",)


class JambaParser(MarkedJsonParser):
    """<tool_calls>[{"name": "f", "arguments": {...}}]</tool_calls>: Jamba."""

    opens = ("<tool_calls>",)
    closes = "</tool_calls>"
    markers = (*opens, closes)


class Phi4MiniParser(MarkedJsonParser):
    """functools[{"name": "f", "arguments": {...}}]: Phi 4 mini."""

    opens = ("functools",)

    def marked(self) -> Reading[None]:
        yield from self.call_list()


class Llama3JsonParser(JsonCallParser):
    """{"name": "f", "parameters": {...}}, several with ; between them: Llama 3.1 and later. <|python_tag|> may go
    before. An object without that tag is a call only if its function was offered."""

    TAG = "<|python_tag|>"
    markers = (TAG,)

    def steps(self) -> Reading[None]:
        reader = self.reader
        while marker := (yield from reader.until(self.TAG, "{", emit=self.content)):
            tagged = marker == self.TAG
            called = yield from self.attempt(self.calls(tagged), marker)
            while called and (between := (yield from self.another())):
                called = yield from self.attempt(self.call_members(tagged), between)

    def calls(self, tagged: bool) -> Reading[None]:
        if tagged:
            yield from self.reader.space()
            yield from self.reader.expect("{")
        yield from self.call_members(marked=tagged)

    def another(self) -> Reading[str]:
        """The separator and brace of one more object, or ""."""
        reader = self.reader
        reader.mark()
        yield from reader.space()
        if (yield from reader.has(";", ",")):
            yield from reader.space()
            if (yield from reader.has("{")):
                return reader.rollback()
        self.content(reader.rollback())
        return ""
