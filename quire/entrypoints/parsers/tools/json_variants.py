"""More formats that write calls as JSON."""

import re

from quire.entrypoints.parsers.tools.base import MAX_NAME
from quire.entrypoints.parsers.tools.json_calls import MarkedJsonParser
from quire.entrypoints.parsers.tools.json_text import short_string
from quire.entrypoints.parsers.tools.reader import Malformed, Reading

LANGUAGE = re.compile(r"[a-z]*")


class LongcatParser(MarkedJsonParser):
    """<longcat_tool_call>{"name": "f", "arguments": {...}}</longcat_tool_call>: LongCat-Flash."""

    opens = ("<longcat_tool_call>",)
    closes = "</longcat_tool_call>"
    markers = (*opens, closes)


class InternLmParser(MarkedJsonParser):
    """<|action_start|><|plugin|>{"name": "f", "parameters": {...}}<|action_end|>: InternLM 2 and later."""

    opens = ("<|action_start|><|plugin|>",)
    closes = "<|action_end|>"
    markers = ("<|action_start|>", "<|plugin|>", closes)


class GigaChatParser(MarkedJsonParser):
    """function call<|role_sep|>{"name": "f", "arguments": {...}}, a message of its own, or <|function_call|>{...}."""

    SEPARATOR, HEADER = "<|message_sep|>", "function call<|role_sep|>"
    opens = (SEPARATOR, HEADER, "<|function_call|>")
    markers = (SEPARATOR, "<|role_sep|>", "<|function_call|>")

    def attempt(self, reading: Reading[None], kept: str = "") -> Reading[bool]:
        return (yield from super().attempt(self._addressed(reading) if kept == self.SEPARATOR else reading, kept))

    def _addressed(self, reading: Reading[None]) -> Reading[None]:
        yield from self.reader.space()
        yield from self.reader.expect(self.HEADER)
        yield from reading


class ApertusParser(MarkedJsonParser):
    """<|tools_prefix|>[{"f": {...}}, ...]<|tools_suffix|>: Apertus."""

    opens = ("<|tools_prefix|>",)
    closes = "<|tools_suffix|>"
    markers = (*opens, closes)

    def call_object(self, marked: bool = True) -> Reading[None]:
        reader = self.reader
        yield from reader.expect("{")
        yield from reader.space()
        name = yield from short_string(reader, MAX_NAME)
        if not name:
            raise Malformed
        yield from reader.space()
        yield from reader.expect(":")
        yield from reader.space()
        yield from self.call_arguments(name)
        yield from reader.space()
        yield from reader.expect("}")


class OfferedJsonParser(MarkedJsonParser):
    """{"name": "f", "parameters": {...}}, or a list of such objects, anywhere in the response: xLAM, and models without
    a format of their own. Without a tag it is a call only if its function was offered."""

    FENCE = "```"
    opens = ("<tool_call>", FENCE, "[", "{")
    closes = "</tool_call>"
    markers = ("<tool_call>", "[TOOL_CALLS]", closes)

    def steps(self) -> Reading[None]:
        while marker := (yield from self.reader.until(*self.opens, emit=self.content)):
            yield from self.attempt(self.after(marker), marker)

    def after(self, marker: str) -> Reading[None]:
        reader = self.reader
        if marker == "{":
            yield from self.call_members(marked=False)
        elif marker == self.FENCE:
            yield from reader.match(LANGUAGE, MAX_NAME)
            yield from self.one_or_more(marked=False)
            yield from reader.has(self.FENCE)
        elif marker == "[" and not (yield from reader.has("TOOL_CALLS]")):
            yield from self.call_items(marked=False)
        else:
            yield from self.one_or_more(marked=True)
            yield from reader.has(self.closes)

    def one_or_more(self, marked: bool) -> Reading[None]:
        yield from self.reader.space()
        if (yield from self.reader.peek()) == "[":
            yield from self.call_list(marked)
        else:
            yield from self.call_object(marked)
        yield from self.reader.space()
