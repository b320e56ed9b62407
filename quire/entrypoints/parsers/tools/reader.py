"""Text that comes in pieces, read as if it were there already.

Every method that may need more text is a generator: it yields where the text ends for now, and goes on when there is
more. So what is read never depends on where the pieces were cut.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
Emit = Callable[[str], object]

SPACE = re.compile(r"[ \t\r\n]*")


class Malformed(Exception):
    """The text is not what the format asks for from here on."""


class Truncated(Malformed):
    """The text ended in the middle of a call."""


class Reader:
    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._places: dict[str, int] = {}  # of the next marker of each kind in the text; -1: it has none
        self._kept: list[str] | None = None

    def add(self, text: str) -> None:
        self.text = self.text[self.at :] + text
        self.at = 0
        self._places.clear()

    def keep(self) -> None:
        """Remember what is read from here on, until `forget` or `give_back`."""
        self._kept = []

    def forget(self) -> None:
        self._kept = None

    def give_back(self) -> str:
        kept, self._kept = "".join(self._kept or ()), None
        return kept

    def take(self, count: int) -> str:
        taken = self.text[self.at : self.at + count]
        self.at += count
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    def peek(self) -> Reading[str]:
        """The next character; Truncated where there is none."""
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
                taken = self.take(len(match[0]))
                if emit is not None:
                    emit(taken)
            if self.at < len(self.text) or self.ended:
                return
            yield

    def has(self, *literals: str) -> Reading[str]:
        """The first of the literals that comes next (it is taken), or none: ""."""
        while True:
            waits = False
            for literal in literals:
                if self.text.startswith(literal, self.at):
                    return self.take(len(literal))
                if not self.ended and literal.startswith(self.text[self.at : self.at + len(literal)]):
                    waits = True  # an earlier literal goes first
                    break
            if not waits:
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
        """What the pattern takes (it must match every prefix of what it matches), up to `longest` characters."""
        while True:
            match = pattern.match(self.text, self.at, self.at + longest + 1)
            found = match[0] if match is not None else ""
            if len(found) > longest:
                raise Malformed
            if self.at + len(found) < len(self.text) or self.ended:
                return self.take(len(found))
            yield

    def match_up_to(self, pattern: re.Pattern[str], longest: int) -> Reading[str]:
        """The same, but what goes on is cut after `longest` characters."""
        while True:
            match = pattern.match(self.text, self.at, self.at + longest)
            found = match[0] if match is not None else ""
            if len(found) == longest or self.at + len(found) < len(self.text) or self.ended:
                return self.take(len(found))
            yield

    def until(self, *markers: str, emit: Emit) -> Reading[str]:
        """Pass text on up to the nearest of the markers, which is taken and returned; "" where the text ends. No
        marker may have another one's beginning inside it."""
        while True:
            found = [(place, marker) for marker in markers if (place := self._place(marker)) >= 0]
            end = len(self.text) if self.ended else self._safe_end(markers)
            place, marker = min(found, default=(end, ""))
            if place > self.at:
                emit(self.take(place - self.at))
            if marker:
                return self.take(len(marker))
            if self.ended:
                return ""
            yield

    def _place(self, marker: str) -> int:
        """Each part of the text is searched once, however often another marker comes first."""
        place = self._places.get(marker, 0)
        if 0 <= place < self.at or marker not in self._places:
            place = self._places[marker] = self.text.find(marker, self.at)
        return place

    def _safe_end(self, markers: tuple[str, ...]) -> int:
        """The text up to here cannot be part of a marker that is still to come."""
        end = len(self.text)
        for marker in markers:
            start = max(self.at, len(self.text) - len(marker) + 1)
            place = self.text.find(marker[0], start)
            while 0 <= place < end:
                if marker.startswith(self.text[place:]):
                    end = place
                    break
                place = self.text.find(marker[0], place + 1)
        return end
