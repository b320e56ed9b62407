"""Formats that write <arg_key>a</arg_key><arg_value>1</arg_value>: GLM, Hunyuan 3 and 4, K2 Horizon."""

import re
from typing import ClassVar

from quire.entrypoints.parsers.tools.base import MAX_NAME
from quire.entrypoints.parsers.tools.reader import Malformed, Reading
from quire.entrypoints.parsers.tools.xml import KEY, NAME, TaggedParser

SUFFIX = re.compile(r"(?::[^\s<>]*)?")
JSON_TYPES = {"string", "integer", "number", "boolean", "array", "object", "null"}


class Glm45Parser(TaggedParser):
    """<tool_call>f\\n<arg_key>a</arg_key>\\n<arg_value>1</arg_value>\\n</tool_call>: GLM 4.5 and later, Ling 3."""

    opens: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    prefix: ClassVar[str] = ""  # of every tag's name
    suffix = ""
    markers: ClassVar[tuple[str, ...]] = (
        *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    )

    def tag(self, name: str) -> str:
        return f"<{self.prefix}{name}{self.suffix}>"

    def end_tag(self, name: str) -> str:
        return f"</{self.prefix}{name}{self.suffix}>"

    def marked(self, marker: str) -> Reading[None]:
        yield from self.one_call()

    def one_call(self) -> Reading[None]:
        """The text after a call's opening tag, with its closing tag."""
        reader = self.reader
        yield from reader.space()
        name = yield from reader.match(NAME, MAX_NAME)
        if not name:
            raise Malformed
        yield from reader.space()
        if (yield from reader.has(self.tag("tool_sep"))):
            yield from reader.space()
        first = True
        while True:
            tag = yield from reader.expect(self.tag("arg_key"), self.end_tag("tool_call"))
            if first:
                self.call(name)
            if tag != self.tag("arg_key"):
                self.arguments("{}" if first else "}")
                return
            key = yield from reader.match(KEY, MAX_NAME)
            yield from reader.expect(self.end_tag("arg_key"))
            yield from reader.space()
            types = yield from self.written_type()
            yield from reader.expect(self.tag("arg_value"))
            yield from self.argument(name, key.strip(), first, (self.end_tag("arg_value"),), types)
            yield from reader.space()
            first = False

    def written_type(self) -> Reading[set[str] | None]:
        """The type, where the text tells it: <arg_type>integer</arg_type>."""
        if not (yield from self.reader.has(self.tag("arg_type"))):
            return None
        written = yield from self.reader.match(KEY, MAX_NAME)
        yield from self.reader.expect(self.end_tag("arg_type"))
        yield from self.reader.space()
        return {written.strip()} if written.strip() in JSON_TYPES else None


class K2HorizonParser(Glm45Parser):
    """<ifm|tool_calls><ifm|tool_call>f<ifm|arg_key>a</ifm|arg_key>..., or a JSON object in <ifm|tool_call>."""

    prefix = "ifm|"
    opens: ClassVar[tuple[str, ...]] = ("<ifm|tool_calls>", "<ifm|tool_call>")
    closes = "</ifm|tool_calls>"
    markers = tuple(
        f"<{slash}ifm|{name}>"
        for name in ("tool_calls", "tool_call", "arg_key", "arg_type", "arg_value")
        for slash in ("", "/")
    )

    def marked(self, marker: str) -> Reading[None]:
        yield from self.section(marker == self.tag("tool_call"))

    def section(self, begun: bool) -> Reading[None]:
        reader = self.reader
        if not begun:
            yield from reader.space()
            yield from reader.expect(self.tag("tool_call"))
        while True:
            yield from reader.space()
            if (yield from reader.peek()) == "{":
                yield from self.call_object()
                yield from reader.space()
                yield from reader.expect(self.end_tag("tool_call"))
            else:
                yield from self.one_call()
            yield from reader.space()
            reader.mark()
            if (yield from reader.has(self.tag("tool_call"), self.end_tag("tool_calls"))) != self.tag("tool_call"):
                return


class HunyuanParser(K2HorizonParser):
    """<tool_calls><tool_call>f<tool_sep><arg_key>a</arg_key>...: Hunyuan 3; 4 has no <tool_sep>. Checkpoints may add a
    suffix to all tags, as in <tool_calls:opensource>: the first tells it."""

    prefix = ""
    opens = ("<tool_calls",)
    markers = tuple(
        f"<{slash}{name}{suffix}>"
        for name in ("tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value")
        for slash in ("", "/")
        for suffix in ("", ":opensource")
    )

    def marked(self, marker: str) -> Reading[None]:
        self.suffix = yield from self.reader.match(SUFFIX, MAX_NAME)
        yield from self.reader.expect(">")
        self.closes = self.end_tag("tool_calls")
        yield from self.section(begun=False)
