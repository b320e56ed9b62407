"""Reasoning between two tags, which is how nearly all models write it."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.entrypoints.parsers.base import ParsedDelta, TextParser
from quire.entrypoints.parsers.reasoning.markers import MarkerSearch

MAX_BLANK = 32  # characters before a start tag; more of them are an answer


@dataclass(frozen=True)
class TagFormat:
    """How a family of models marks its reasoning; several spellings of a tag mean the same.

    Reasoning comes first and only once: a start tag later in the answer is text. Where the end tag never comes, all
    that followed the start is reasoning.
    """

    starts: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    implied: bool = False  # reasoning begins with the first character, whether or not the tag is written
    ends_before: tuple[str, ...] = ()  # texts that end the reasoning too, but belong to the answer
    closing: tuple[str, ...] = ()  # left out of the answer

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
        """What the text must hold even where the tokenizer calls it a special token."""
        return (*self.starts, *self.end_markers, *self.closing)

    def is_open(self, prompt: str, goes_on: bool = False) -> bool | None:
        """Whether an answer to this prompt begins inside the reasoning (the chat template wrote the start tag), begins
        after it (the template wrote an empty one), or decides that itself: None.

        `goes_on`: the prompt ends within an answer, after any text."""
        end = prompt.rstrip()
        if end.endswith(_stripped(self.starts)):
            return True
        if end.endswith(_stripped(self.ends)):
            return False
        if goes_on:
            started, ended = _last(prompt, self.starts), _last(prompt, self.ends)
            return started > ended
        return True if self.implied else None

    def parser(self, open: bool | None) -> TextParser:
        return TagParser(self, open)


class TagParser:
    def __init__(self, format: TagFormat, open: bool | None) -> None:
        """`open`: as TagFormat.is_open() says."""
        self._undecided = open is not False
        self._needs_start = open is None
        self._format = format
        self._begun = ""  # the first characters, until it is known whether they are a start tag
        self._ends = MarkerSearch(format.end_markers)
        self._closing = MarkerSearch(format.closing)
        self.reasoning = not self._needs_start and self._undecided

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> ParsedDelta:
        if self._undecided:
            text = self._opened(text)
        if not text:
            return ParsedDelta()
        return self._inside(text) if self.reasoning else ParsedDelta(content=self._answer(text))

    def finish(self) -> ParsedDelta:
        begun, self._begun = self._begun, ""
        if self.reasoning:
            return ParsedDelta(reasoning=begun + self._ends.finish())
        return ParsedDelta(content=self._answer(begun) + self._closing.finish())

    def _opened(self, text: str) -> str:
        """What is left once it is known whether the text begins with a start tag."""
        text = self._begun + text
        self._begun = ""
        begin = text.lstrip()
        if len(text) - len(begin) <= MAX_BLANK:
            for start in self._format.starts:
                if begin.startswith(start):
                    self._undecided, self.reasoning = False, True
                    return begin[len(start) :]
            if any(start.startswith(begin) for start in self._format.starts):
                self._begun = text
                return ""
        self._undecided = False
        return text

    def _inside(self, text: str) -> ParsedDelta:
        before, marker, after = self._ends.feed(text)
        if marker is None:
            return ParsedDelta(reasoning=before)
        self.reasoning = False
        if marker in self._format.ends_before:
            after = marker + after
        return ParsedDelta(self._answer(after), before)

    def _answer(self, text: str) -> str:
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
