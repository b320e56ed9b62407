"""Formats that write <invoke name="f"><parameter name="a">1</parameter></invoke>, under various tags."""

import re
from typing import ClassVar

from quire.entrypoints.parsers.tools.base import MAX_NAME
from quire.entrypoints.parsers.tools.reader import Malformed, Reading
from quire.entrypoints.parsers.tools.xml import TaggedParser

ATTRIBUTES = re.compile(r"[^<>\n]*")
ATTRIBUTE = re.compile(r"""(\w+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"']+))""")
CDATA = "<![CDATA["


class InvokeParser(TaggedParser):
    """Calls within `opens` and `closes`, or without such tags where `opens` are the calls' own."""

    prefix: str = ""  # of the tags' names
    invoke: ClassVar[str] = "invoke"
    parameter: ClassVar[str] = "parameter"
    layout: ClassVar[tuple[str, ...]] = ()  # ignored between calls

    def opening(self, name: str) -> str:
        return f"<{self.prefix}{name} name="

    def marked(self, marker: str) -> Reading[None]:
        yield from self.invokes()
        yield from self.reader.has(self.closes)

    def invokes(self) -> Reading[None]:
        """One call or more."""
        reader, opening = self.reader, self.opening(self.invoke)
        yield from self.gap()
        yield from reader.expect(opening)
        while True:
            yield from self.one_call()
            reader.mark()
            yield from self.gap()
            if not (yield from reader.has(opening)):
                return

    def gap(self) -> Reading[None]:
        yield from self.reader.space()
        while (yield from self.reader.has(*self.layout)):
            yield from self.reader.space()

    def one_call(self) -> Reading[None]:
        """The text after a call's opening tag up to its name."""
        reader = self.reader
        name = self.called((yield from self.attributes()).get("name", ""))
        if not name:
            raise Malformed
        closing, opening = f"</{self.prefix}{self.invoke}>", self.opening(self.parameter)
        yield from reader.space()
        first = True
        while True:
            tag = yield from reader.expect(opening, closing)
            if first:
                self.call(name)
            if tag == closing:
                self.arguments("{}" if first else "}")
                return
            told = yield from self.attributes()
            types = {"true": {"string"}, "false": set[str]()}.get(told.get("string", ""))
            closes = f"</{self.prefix}{self.parameter}>"
            if (yield from reader.has(CDATA)):
                closes = f"]]>{closes}"
            yield from self.argument(name, told.get("name", ""), first, (closes,), types)
            yield from reader.space()
            first = False

    def called(self, name: str) -> str:
        """The function that a written name means."""
        return name

    def attributes(self) -> Reading[dict[str, str]]:
        """A tag's attributes, from the name's value on."""
        text = yield from self.reader.match(ATTRIBUTES, 2 * MAX_NAME)
        yield from self.reader.expect(">")
        return {key: a or b or c for key, a, b, c in ATTRIBUTE.findall(f"name={text}")}


class MiniMaxM2Parser(InvokeParser):
    """<minimax:tool_call><invoke name="f"><parameter name="a">1</parameter></invoke></minimax:tool_call>"""

    opens = ("<minimax:tool_call>",)
    closes = "</minimax:tool_call>"
    markers = (*opens, closes)


class DotsParser(InvokeParser):
    """The same in <dots_function_call>, or a JSON object there."""

    opens = ("<dots_function_call>",)
    closes = "</dots_function_call>"
    markers = (*opens, closes)

    def marked(self, marker: str) -> Reading[None]:
        yield from self.reader.space()
        if (yield from self.reader.peek()) != "{":
            yield from super().marked(marker)
            return
        yield from self.call_object()
        yield from self.reader.space()
        yield from self.reader.expect(self.closes)


class DeepSeekDsmlParser(InvokeParser):
    """<｜DSML｜function_calls> in DeepSeek V3.2, <｜DSML｜tool_calls> in V4, <｜DSML｜ calls> in V4.1, where all
    tags have the space; parameters have string="true" or "false"."""

    opens = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", "<｜DSML｜ calls>")
    markers = ("｜DSML｜", *opens)

    def marked(self, marker: str) -> Reading[None]:
        self.prefix = "｜DSML｜ " if " " in marker else "｜DSML｜"
        self.closes = f"</{marker[1:]}"
        yield from super().marked(marker)


class Step3Parser(InvokeParser):
    """<steptml:invoke name="f">, with special tokens around each call and around all."""

    prefix = "steptml:"
    opens = ("<｜tool_calls_begin｜>",)
    closes = "<｜tool_calls_end｜>"
    layout = ("<｜tool_call_begin｜>", "<｜tool_call_end｜>", "<｜tool_sep｜>")
    markers = (*opens, closes, *layout)


class MiniCpm5Parser(InvokeParser):
    """<function name="f"><param name="a">1</param></function>, values also as CDATA."""

    invoke, parameter = "function", "param"
    opens = ("<function name=",)
    closes = "</function>"

    def marked(self, marker: str) -> Reading[None]:
        yield from self.one_call()
