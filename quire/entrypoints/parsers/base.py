"""What parsers of generated text share: reasoning and tool calls are told from content while the text comes.

A whole answer is one feed() and finish() of the same parser, so streamed and whole answers agree by construction.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass
class ToolCallDelta:
    """The first one of a call has its id and name; those after it have more of its arguments."""

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
    """Splits generated text as it comes. Linear in the text: each character is looked at a bounded number of times."""

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> ParsedDelta: ...

    def finish(self) -> ParsedDelta:
        """What was held back."""
        ...


class Chain:
    """Reasoning first; what is left as content goes to the second parser, which never sees the reasoning."""

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
