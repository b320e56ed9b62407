"""Formats with a section of calls between special tokens: name, separator, JSON arguments."""

import re
from abc import abstractmethod
from typing import ClassVar

from quire.entrypoints.parsers.tools.base import MAX_NAME
from quire.entrypoints.parsers.tools.json_calls import JsonCallParser
from quire.entrypoints.parsers.tools.reader import Malformed, Reading

NAME = re.compile(r"[\w.:/-]*")


class SectionParser(JsonCallParser):
    section_opens: ClassVar[str]
    section_closes: ClassVar[str]
    call_opens: ClassVar[str]
    call_closes: ClassVar[str]

    @abstractmethod
    def one_call(self) -> Reading[None]:
        """The text between a call's markers."""

    def steps(self) -> Reading[None]:
        reader = self.reader
        opens = (self.section_opens, self.call_opens)
        marker = yield from reader.until(*opens, emit=self.content)
        while marker:
            before = self.num_calls
            whole = yield from self.attempt(self.section(marker), marker)
            if not whole and self.num_calls > before:
                marker = yield from reader.until(self.call_closes, self.section_closes, *opens, emit=self.content)
                if marker in opens:
                    continue
                if marker == self.call_closes:
                    yield from reader.space()
                    yield from reader.has(self.section_closes)
            marker = yield from reader.until(*opens, emit=self.content)

    def section(self, opened_by: str) -> Reading[None]:
        reader = self.reader
        if opened_by == self.section_opens:
            yield from reader.space()
            yield from reader.expect(self.call_opens)
        while True:
            yield from reader.space()
            yield from self.one_call()
            yield from reader.space()
            yield from reader.has(self.call_closes)
            yield from reader.space()
            reader.mark()
            if (yield from reader.has(self.call_opens, self.section_closes)) != self.call_opens:
                return


class DeepSeekParser(SectionParser):
    """DeepSeek V3 and R1 write "function", a separator, the name, and the arguments in a code block; V3.1 the name, a
    separator and the arguments."""

    section_opens = "<｜tool▁calls▁begin｜>"
    section_closes = "<｜tool▁calls▁end｜>"
    call_opens = "<｜tool▁call▁begin｜>"
    call_closes = "<｜tool▁call▁end｜>"
    separator = "<｜tool▁sep｜>"
    markers = (section_opens, section_closes, call_opens, call_closes, separator)
    fence = "```"

    def one_call(self) -> Reading[None]:
        reader = self.reader
        name = yield from reader.match(NAME, MAX_NAME)
        yield from reader.expect(self.separator)
        yield from reader.space()
        fenced = (yield from reader.peek()) != "{"
        if fenced:
            name = yield from reader.match(NAME, MAX_NAME)
            yield from reader.space()
            yield from reader.expect(f"{self.fence}json", self.fence)
            yield from reader.space()
        if not name:
            raise Malformed
        yield from self.call_arguments(name)
        if fenced:
            yield from reader.space()
            yield from reader.expect(self.fence)


class KimiParser(SectionParser):
    """Kimi K2 names a call functions.NAME:NUMBER, and its chat template expects that as the call's id."""

    section_opens = "<|tool_calls_section_begin|>"
    section_closes = "<|tool_calls_section_end|>"
    call_opens = "<|tool_call_begin|>"
    call_closes = "<|tool_call_end|>"
    separator = "<|tool_call_argument_begin|>"
    markers = (section_opens, section_closes, call_opens, call_closes, separator)

    def one_call(self) -> Reading[None]:
        reader = self.reader
        id = yield from reader.match(NAME, MAX_NAME)
        name = id.rpartition(":")[0].removeprefix("functions.")
        if not name:
            raise Malformed
        yield from reader.space()
        yield from reader.expect(self.separator)
        yield from reader.space()
        yield from self.call_arguments(name, id)


class PlamoParser(SectionParser):
    """PLaMo 3: name and arguments of a call between tags of their own, which consist of several special tokens."""

    section_opens = "<|plamo:begin_tool_requests:plamo|>"
    section_closes = "<|plamo:end_tool_requests:plamo|>"
    call_opens = "<|plamo:begin_tool_request:plamo|>"
    call_closes = "<|plamo:end_tool_request:plamo|>"
    markers = ("<|plamo:begin_", "<|plamo:end_", ":plamo|>", "<|plamo:constrain|>", "<|plamo:msg|>")

    def one_call(self) -> Reading[None]:
        reader = self.reader
        yield from reader.expect("<|plamo:begin_tool_name:plamo|>")
        name = yield from reader.match(NAME, MAX_NAME)
        yield from reader.expect("<|plamo:end_tool_name:plamo|>")
        if not name:
            raise Malformed
        yield from reader.space()
        yield from reader.expect("<|plamo:begin_tool_arguments:plamo|>")
        yield from reader.has("<|plamo:constrain|>json")
        yield from reader.has("<|plamo:msg|>")
        yield from reader.space()
        yield from self.call_arguments(name)
        yield from reader.space()
        yield from reader.expect("<|plamo:end_tool_arguments:plamo|>")
