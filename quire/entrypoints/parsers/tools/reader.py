"""A reader for streamed text, used as if the whole text were available.

Methods that may need more text are generators: they yield at the end of the text received so far and resume when there
is more. So the result never depends on where the stream was split.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
Emit = Callable[[str], object]

SPACE = re.compile(r"[ \t\r\n]*")


class Malformed(Exception):
    """The text does not match the format."""


class Truncated(Malformed):
    """The text ended in the middle of a call."""


class Reader:
    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._marker_positions: dict[str, int] = {}  # next position of each marker; -1: none
        self._recorded: list[str] | None = None

    def add(self, text: str) -> None:
        self.text = self.text[self.at :] + text
        self.at = 0
        self._marker_positions.clear()

    def mark(self) -> None:
        """Record what is consumed from here, until `commit` or `rollback`."""
        self._recorded = []

    def commit(self) -> None:
        self._recorded = None

    def rollback(self) -> str:
        """The text consumed since `mark`."""
        kept, self._recorded = "".join(self._recorded or ()), None
        return kept

    def consume(self, count: int) -> str:
        consumed = self.text[self.at : self.at + count]
        self.at += count
        if self._recorded is not None:
            self._recorded.append(consumed)
        return consumed

    def peek(self) -> Reading[str]:
        """The next character; raises Truncated at the end."""
        while self.at == len(self.text):
            if self.ended:
                raise Truncated
            yield
        return self.text[self.at]

    def at_end(self) -> Reading[bool]:
        while self.at == len(self.text) and not self.ended:
            yield
        return self.at == len(self.text)

    def space(self, emit: Emit | None = None) -> Reading[None]:
        while True:
            match = SPACE.match(self.text, self.at)
            assert match is not None
            if match[0]:
                consumed = self.consume(len(match[0]))
                if emit is not None:
                    emit(consumed)
            if self.at < len(self.text) or self.ended:
                return
            yield

    def has(self, *literals: str) -> Reading[str]:
        """Consume and return the first of `literals` that the text continues with; "" if none."""
        while True:
            incomplete = False
            for literal in literals:
                if self.text.startswith(literal, self.at):
                    return self.consume(len(literal))
                if not self.ended and literal.startswith(self.text[self.at : self.at + len(literal)]):
                    incomplete = True  # an earlier literal has precedence
                    break
            if not incomplete:
                return ""
            yield

    def expect(self, *literals: str) -> Reading[str]:
        found = yield from self.has(*literals)
        if not found:
            rest = self.text[self.at : self.at + max(map(len, literals))]
            short = self.at + len(rest) == len(self.text)
            cut_off = self.ended and short and any(literal.startswith(rest) for literal in literals)
            raise Truncated if cut_off else Malformed
        return found

    def match(self, pattern: re.Pattern[str], longest: int) -> Reading[str]:
        """Consume what the pattern matches, up to `longest` characters. It must match every prefix of its matches."""
        while True:
            match = pattern.match(self.text, self.at, self.at + longest + 1)
            found = match[0] if match is not None else ""
            if len(found) > longest:
                raise Malformed
            if self.at + len(found) < len(self.text) or self.ended:
                return self.consume(len(found))
            yield

    def match_up_to(self, pattern: re.Pattern[str], longest: int) -> Reading[str]:
        """The same, but a longer match is cut after `longest` characters."""
        while True:
            match = pattern.match(self.text, self.at, self.at + longest)
            found = match[0] if match is not None else ""
            if len(found) == longest or self.at + len(found) < len(self.text) or self.ended:
                return self.consume(len(found))
            yield

    def until(self, *markers: str, emit: Emit) -> Reading[str]:
        """Emit text up to the nearest of the markers, which is consumed and returned; "" at the end of the text. No
        marker may contain the beginning of another."""
        while True:
            found = [(position, marker) for marker in markers if (position := self._marker_position(marker)) >= 0]
            end = len(self.text) if self.ended else self._safe_end(markers)
            position, marker = min(found, default=(end, ""))
            if position > self.at:
                emit(self.consume(position - self.at))
            if marker:
                return self.consume(len(marker))
            if self.ended:
                return ""
            yield

    def _marker_position(self, marker: str) -> int:
        """Cached, so that each part of the text is searched once per marker."""
        position = self._marker_positions.get(marker, 0)
        if 0 <= position < self.at or marker not in self._marker_positions:
            position = self._marker_positions[marker] = self.text.find(marker, self.at)
        return position

    def _safe_end(self, markers: tuple[str, ...]) -> int:
        """The end of the text that cannot be part of an incomplete marker."""
        end = len(self.text)
        for marker in markers:
            start = max(self.at, len(self.text) - len(marker) + 1)
            position = self.text.find(marker[0], start)
            while 0 <= position < end:
                if marker.startswith(self.text[position:]):
                    end = position
                    break
                position = self.text.find(marker[0], position + 1)
        return end
