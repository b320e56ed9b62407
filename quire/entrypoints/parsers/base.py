"""The interface of streaming parsers, which split generated text into content, reasoning and tool calls.

A whole response is one feed() and finish() of the same parser, so streamed and whole responses agree by construction.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass
class ToolCallDelta:
    """A call's first delta has its id and name; later ones append to its arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass
class ParsedDelta:
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)


class TextParser(Protocol):
    """Splits generated text incrementally, in time linear in the text."""

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> ParsedDelta: ...

    def finish(self) -> ParsedDelta:
        """The text held back so far, at the end of the response."""
        ...


class Chain:
    """Feeds the first parser's content to the second: tool calls are only looked for outside the reasoning."""

    def __init__(self, first: TextParser, second: TextParser) -> None:
        self.first = first
        self.second = second

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> ParsedDelta:
        found = self.first.feed(text, token_ids)
        if not found.content:
            return found
        after = self.second.feed(found.content, token_ids)
        return ParsedDelta(after.content, found.reasoning + after.reasoning, after.tool_calls)

    def finish(self) -> ParsedDelta:
        found = self.first.finish()
        fed = self.second.feed(found.content) if found.content else ParsedDelta()
        last = self.second.finish()
        reasoning = found.reasoning + fed.reasoning + last.reasoning
        return ParsedDelta(fed.content + last.content, reasoning, fed.tool_calls + last.tool_calls)
