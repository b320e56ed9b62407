"""Reasoning in a channel of the response, which the family's tool parser reads along with the calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from quire.entrypoints.parsers.base import ParsedDelta, TextParser
from quire.entrypoints.parsers.tools.registry import ParserFactory, tool_parser


@dataclass(frozen=True)
class ChannelFormat:
    """`tools` names the tool parser. Where every part is `headed`, nothing is reasoning before the first header, but a
    grammar applies from `end` on only."""

    start: str
    end: str
    tools: str
    implied: bool = False  # a response begins inside the reasoning
    headed: bool = False

    @cached_property
    def factory(self) -> ParserFactory:
        return tool_parser(self.tools)

    @property
    def end_markers(self) -> tuple[str, ...]:
        return (self.end,)

    @property
    def markers(self) -> Sequence[str]:
        found: Sequence[str] = getattr(self.factory, "markers", ())
        return found

    def is_open(self, prompt: str, continues: bool = False) -> bool | None:
        end = prompt.rstrip()
        if end.endswith(self.start):
            return True
        if end.endswith(self.end):
            return False
        if continues:
            return prompt.rfind(self.start) > prompt.rfind(self.end)
        return True if self.implied or self.headed else None

    def with_calls(self, tools: Sequence[Mapping[str, Any]], open: bool | None) -> TextParser:
        """A parser of reasoning, content and calls."""
        parser = self.factory(tools)
        if open and not self.headed:
            parser.inside = True  # type: ignore[attr-defined]
        return parser

    def parser(self, open: bool | None) -> TextParser:
        return WithoutCalls(self.with_calls((), open))


class WithoutCalls:
    """For requests without tools: a call's arguments are content."""

    def __init__(self, parser: TextParser) -> None:
        self.inner = parser

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> ParsedDelta:
        return self._as_content(self.inner.feed(text, token_ids))

    def finish(self) -> ParsedDelta:
        return self._as_content(self.inner.finish())

    def _as_content(self, found: ParsedDelta) -> ParsedDelta:
        arguments = "".join(call.arguments for call in found.tool_calls)
        return ParsedDelta(found.content + arguments, found.reasoning)


@dataclass(frozen=True)
class KeptFormat:
    """The reasoning stays in the content, after a start tag that the prompt has written."""

    start: str = "<think>"
    end: str = "</think>"

    @property
    def end_markers(self) -> tuple[str, ...]:
        return (self.end,)

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.start, self.end)

    def is_open(self, prompt: str, continues: bool = False) -> bool | None:
        return not prompt.rstrip().endswith(self.end)

    def parser(self, open: bool | None) -> TextParser:
        return _Prepended(self.start if open else "")


class _Prepended:
    def __init__(self, start: str) -> None:
        self.start = start

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> ParsedDelta:
        start, self.start = self.start, ""
        return ParsedDelta(start + text)

    def finish(self) -> ParsedDelta:
        return self.feed("")
