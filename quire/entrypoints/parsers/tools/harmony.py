"""The format of gpt-oss: messages with a header that names their channel and recipient."""

import re

from quire.entrypoints.parsers.tools.base import MAX_NAME
from quire.entrypoints.parsers.tools.json_calls import JsonCallParser
from quire.entrypoints.parsers.tools.reader import Malformed, Reading

HEADER = re.compile(r"(?:[^<]|<(?!\|message\|>|\|start\|>))*")
CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(r"\bto=functions\.([\w.:/-]+)")
TO = re.compile(r" ?(?:t(?:o(?:=[\w.:/-]*)?)?)?")
MAX_HEADER = 2 * MAX_NAME


class HarmonyParser(JsonCallParser):
    """<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>. The channel analysis is
    reasoning; final, and commentary without a recipient, are content."""

    STARTS = ("<|start|>", "<|channel|>")
    ENDS = ("<|end|>", "<|call|>", "<|return|>")
    markers = (*STARTS, *ENDS, "<|message|>", "<|constrain|>")

    def steps(self) -> Reading[None]:
        yield from self.attempt(self.addressed())
        marker = yield from self.reader.until(*self.STARTS, emit=self.content)
        while marker:
            if not (yield from self.attempt(self.message(marker), marker)):
                yield from self.reader.until(*self.ENDS, emit=self.content)
            marker = yield from self.reader.until(*self.STARTS, emit=self.content)

    def addressed(self) -> Reading[None]:
        """The prompt ends with the role, so a response may begin with its recipient."""
        to = yield from self.reader.match(TO, MAX_NAME)
        yield from self.reader.expect("<|channel|>")
        yield from self.message(f"{to}<|channel|>")

    def message(self, marker: str) -> Reading[None]:
        reader = self.reader
        header = marker + (yield from reader.match(HEADER, MAX_HEADER))
        yield from reader.expect("<|message|>")
        recipient, channel = RECIPIENT.search(header), CHANNEL.search(header)
        if recipient is not None:
            yield from reader.space()
            yield from self.call_arguments(recipient[1])
            yield from reader.space()
            if not (yield from reader.at_end()):
                yield from reader.expect(*self.ENDS)
            return
        if channel is None:
            raise Malformed
        reader.commit()
        emit = self.reasoning if channel[1] == "analysis" else self.content
        yield from reader.until(*self.ENDS, emit=emit)
