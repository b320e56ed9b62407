"""Reasoning between a start and an end tag, the format of nearly all models."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire.entrypoints.parsers.base import ParsedDelta, TextParser
from quire.entrypoints.parsers.reasoning.markers import MarkerSearch

MAX_BLANK = 32  # white-space characters before a start tag; more are content


@dataclass(frozen=True)
class TagFormat:
    """How a model family marks its reasoning; a tag may have several spellings.

    Reasoning comes first and only once: a later start tag is content. Without an end tag, everything after the start
    is reasoning.
    """

    starts: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    implied: bool = False  # reasoning begins with the first character, whether or not the tag is written
    ends_before: tuple[str, ...] = ()  # texts that also end the reasoning, but belong to the content
    closing: tuple[str, ...] = ()  # removed from the content
    tokens: tuple[str, ...] = ()  # special tokens that the tags consist of

    def __post_init__(self) -> None:
        for tags in (self.starts, self.end_markers, self.closing):
            inside = [(a, b) for a in tags for b in tags if a is not b and a in b]
            if inside or "" in tags:
                raise ValueError(f"reasoning tags must not be empty or part of one another: {inside or tags}")
        if not self.starts or not self.ends:
            raise ValueError("a reasoning format needs a start tag and an end tag")

    @property
    def start(self) -> str:
        return self.starts[0]

    @property
    def end(self) -> str:
        return self.ends[0]

    @property
    def end_markers(self) -> tuple[str, ...]:
        return (*self.ends, *self.ends_before)

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that must not be skipped as special tokens."""
        return (*self.starts, *self.end_markers, *self.closing, *self.tokens)

    def is_open(self, prompt: str, continues: bool = False) -> bool | None:
        """Whether a response to this prompt starts inside the reasoning (the chat template wrote the start tag), after
        it (the template wrote an empty pair), or either: None.

        `continues`: the prompt ends inside a response that is to be continued."""
        end = prompt.rstrip()
        if end.endswith(_stripped(self.starts)):
            return True
        if end.endswith(_stripped(self.ends)):
            return False
        if continues:
            started, ended = _last(prompt, self.starts), _last(prompt, self.ends)
            return started > ended
        return True if self.implied else None

    def parser(self, open: bool | None) -> TextParser:
        return TagParser(self, open)


@dataclass(frozen=True)
class SuffixedFormat(TagFormat):
    """Tags to which a checkpoint may add a suffix of its own, as in <think:opensource>."""

    def for_tokens(self, tokens: Iterable[str]) -> TagFormat:
        """The format with the suffix that a vocabulary's tokens have."""
        found = (re.fullmatch(r"<think(:[^\s<>]+)>", token) for token in tokens)
        suffix = next((match[1] for match in found if match is not None), "")
        return TagFormat((f"<think{suffix}>",), (f"</think{suffix}>",), ends_before=(f"<tool_calls{suffix}>",))


class TagParser:
    def __init__(self, format: TagFormat, open: bool | None) -> None:
        """`open`: the result of TagFormat.is_open()."""
        self._undecided = open is not False
        self._needs_start = open is None
        self._format = format
        self._held_start = ""  # the first characters, while they may be a start tag
        self._ends = MarkerSearch(format.end_markers)
        self._closing = MarkerSearch(format.closing)
        self.reasoning = not self._needs_start and self._undecided

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> ParsedDelta:
        if self._undecided:
            text = self._after_start_tag(text)
        if not text:
            return ParsedDelta()
        return self._reasoning_text(text) if self.reasoning else ParsedDelta(content=self._content(text))

    def finish(self) -> ParsedDelta:
        begun, self._held_start = self._held_start, ""
        if self.reasoning:
            return ParsedDelta(reasoning=begun + self._ends.finish())
        return ParsedDelta(content=self._content(begun) + self._closing.finish())

    def _after_start_tag(self, text: str) -> str:
        """The text after the start tag, if any; "" while undecided."""
        text = self._held_start + text
        self._held_start = ""
        begin = text.lstrip()
        if len(text) - len(begin) <= MAX_BLANK:
            for start in self._format.starts:
                if begin.startswith(start):
                    self._undecided, self.reasoning = False, True
                    return begin[len(start) :]
            if any(start.startswith(begin) for start in self._format.starts):
                self._held_start = text
                return ""
        self._undecided = False
        return text

    def _reasoning_text(self, text: str) -> ParsedDelta:
        before, marker, after = self._ends.feed(text)
        if marker is None:
            return ParsedDelta(reasoning=before)
        self.reasoning = False
        if marker in self._format.ends_before:
            after = marker + after
        return ParsedDelta(self._content(after), before)

    def _content(self, text: str) -> str:
        if not self._closing.markers or not text:
            return text
        parts = []
        marker: str | None = ""
        while marker is not None:
            before, marker, text = self._closing.feed(text)
            parts.append(before)
        return "".join(parts)


def _stripped(tags: Sequence[str]) -> tuple[str, ...]:
    return tuple(tag.strip() for tag in tags)


def _last(text: str, tags: Sequence[str]) -> int:
    return max(text.rfind(tag.strip()) for tag in tags)
