"""Formats whose responses are parts in channels: reasoning, text and calls, each under a marker of its own."""

import re
from html import unescape
from typing import ClassVar

from quire.entrypoints.parsers.tools.base import MAX_NAME
from quire.entrypoints.parsers.tools.invoke import ATTRIBUTE, InvokeParser
from quire.entrypoints.parsers.tools.reader import Emit, Malformed, Reading
from quire.entrypoints.parsers.tools.xml import TaggedParser

HEADER = re.compile(r"(?:[^<]|<(?!\|message\|>|\|start\|>))*")
RECIPIENT = re.compile(r"\bto=([\w.-]+)")
TO = re.compile(r" ?(?:t(?:o(?:=[\w.-]*)?)?)?")
CITATION_END = re.compile(r"[^<>]*")
XTML_TAG = re.compile(r"[^<\n]*")


class ChannelParser(TaggedParser):
    """A marker says what follows it; `opens` are the markers of calls."""

    reasons: ClassVar[tuple[str, ...]] = ()  # reasoning follows
    speaks: ClassVar[tuple[str, ...]] = ()  # content follows
    inside = False  # whether the prompt has begun the reasoning

    def steps(self) -> Reading[None]:
        reader = self.reader
        emit: Emit = self.reasoning if self.inside else self.content
        while marker := (yield from reader.until(*self.opens, *self.reasons, *self.speaks, emit=emit)):
            if marker not in self.opens:
                emit = yield from self.switch(marker, emit)
                continue
            before = self.num_calls
            if not (yield from self.attempt(self.marked(marker), marker)) and self.num_calls > before:
                yield from reader.until(self.closes, emit=self.content)
            emit = self.content

    def switch(self, marker: str, emit: Emit) -> Reading[Emit]:
        """Where the text after a marker goes; the text before it went to `emit`."""
        yield from ()
        if marker in self.reasons:
            return self.reasoning
        self.drop_space()
        return self.content


class CohereParser(ChannelParser):
    """<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {...}}]<|END_ACTION|>: Command A and R7B.
    Citations, <co>text</co: 0:[1]>, become their text."""

    name_key, id_key = "tool_name", "tool_call_id"
    opens = ("<|START_ACTION|>",)
    closes = "<|END_ACTION|>"
    reasons = ("<|START_THINKING|>",)
    tokens = ("<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
    speaks = (*tokens, "<co>", "</co")
    markers = (*opens, closes, *reasons, *tokens)

    def switch(self, marker: str, emit: Emit) -> Reading[Emit]:
        if marker == "</co":
            told = yield from self.reader.match_up_to(CITATION_END, MAX_NAME)
            if not (yield from self.reader.has(">")):
                emit(marker + told)
        return emit if marker in ("<co>", "</co") else (yield from super().switch(marker, emit))

    def marked(self, marker: str) -> Reading[None]:
        yield from self.reader.space()
        yield from self.call_list()
        yield from self.reader.space()
        yield from self.reader.has(self.closes)


class InklingParser(ChannelParser):
    """<|message_model|><|content_invoke_tool_json|>{"name": "f", "args": {...}}<|end_message|>: Inkling."""

    argument_keys = ("args", "arguments", "parameters")
    opens = ("<|content_invoke_tool_json|>",)
    closes = "<|end_message|>"
    reasons = ("<|content_thinking|>",)
    speaks = ("<|message_model|>", "<|content_text|>", closes, "<|content_model_end_sampling|>")
    markers = (*opens, *reasons, *speaks)

    def marked(self, marker: str) -> Reading[None]:
        yield from self.reader.space()
        yield from self.call_object()
        yield from self.reader.space()
        yield from self.reader.has(self.closes)


class KimiK3Parser(ChannelParser):
    """<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="number"<|sep|>1
    <|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>: Kimi K3."""

    opens = ("<|open|>tools<|sep|>",)
    closes = "<|close|>tools<|sep|>"
    reasons = ("<|open|>think<|sep|>",)
    speaks = (
        *("<|close|>think<|sep|>", "<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    )
    markers = ("<|open|>", "<|close|>", "<|sep|>")

    def marked(self, marker: str) -> Reading[None]:
        reader, opening = self.reader, "<|open|>call "
        yield from reader.space()
        yield from reader.expect(opening)
        while True:
            yield from self.one_call()
            yield from reader.space()
            reader.mark()
            if (yield from reader.has(opening, self.closes)) != opening:
                return

    def one_call(self) -> Reading[None]:
        reader, opening = self.reader, "<|open|>argument "
        name = (yield from self.attributes()).get("tool", "")
        if not name:
            raise Malformed
        first = True
        while True:
            yield from reader.space()
            tag = yield from reader.expect(opening, "<|close|>call<|sep|>")
            if first:
                self.call(name)
            if tag != opening:
                self.arguments("{}" if first else "}")
                return
            told = yield from self.attributes()
            types = {"string"} if told.get("type") == "string" else set[str]()
            yield from self.argument(name, told.get("key", ""), first, ("<|close|>argument<|sep|>",), types)
            first = False

    def attributes(self) -> Reading[dict[str, str]]:
        text = yield from self.reader.match(XTML_TAG, 2 * MAX_NAME)
        yield from self.reader.expect("<|sep|>")
        return {key: unescape(a or b or c) for key, a, b, c in ATTRIBUTE.findall(text)}


class MuseGlimmerParser(InvokeParser):
    """to=f<|message|><atem:function_calls><atem:invoke name="f">...<|eom|>: each message has a recipient, self for
    reasoning and user for content."""

    prefix = "atem:"
    opens = ("<|start|>",)
    closes = "</atem:function_calls>"
    ENDS = ("<|eom|>", "<|eot|>")
    markers = (*opens, *ENDS, "<|message|>")

    def steps(self) -> Reading[None]:
        yield from self.attempt(self.addressed())
        while marker := (yield from self.reader.until(*self.opens, emit=self.content)):
            if not (yield from self.attempt(self.marked(marker), marker)):
                yield from self.reader.until(*self.ENDS, emit=self.content)

    def addressed(self) -> Reading[None]:
        """The prompt ends with the role, so a response may begin with its recipient."""
        to = yield from self.reader.match(TO, MAX_NAME)
        yield from self.body(to)

    def marked(self, marker: str) -> Reading[None]:
        header = yield from self.reader.match(HEADER, 2 * MAX_NAME)
        yield from self.body(header)

    def body(self, header: str) -> Reading[None]:
        reader = self.reader
        yield from reader.expect("<|message|>")
        found = RECIPIENT.search(header)
        recipient = found[1] if found is not None else "user"
        if recipient in ("user", "self"):
            reader.commit()
            yield from reader.until(*self.ENDS, emit=self.content if recipient == "user" else self.reasoning)
            return
        yield from reader.space()
        yield from reader.expect("<atem:function_calls>")
        yield from self.invokes()
        yield from reader.has(self.closes)
        yield from reader.space()
        yield from reader.has(*self.ENDS)

    def called(self, name: str) -> str:
        """Of a function f that belongs to no namespace the model writes f.f."""
        head, _, tail = name.partition(".")
        return head if head == tail and name not in self.schemas else name
