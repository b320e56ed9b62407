"""Searches streamed text for fixed markers."""

from collections.abc import Sequence


class MarkerSearch:
    """Finds the first of several markers. Text that cannot be part of a marker is returned at once, so the held-back
    text is always shorter than the longest marker."""

    def __init__(self, markers: Sequence[str]) -> None:
        self.markers = tuple(markers)
        self.longest = max(map(len, self.markers), default=0)
        self.held = ""

    def feed(self, text: str) -> tuple[str, str | None, str]:
        """The text before a marker, the marker if there is one, and the text after it."""
        text = self.held + text
        self.held = ""
        found = min(((at, -len(m), m) for m in self.markers if (at := text.find(m)) >= 0), default=None)
        if found is not None:
            at, _, marker = found
            return text[:at], marker, text[at + len(marker) :]
        length = self._held_length(text)
        if length:
            self.held = text[-length:]
            return text[:-length], None, ""
        return text, None, ""

    def finish(self) -> str:
        held, self.held = self.held, ""
        return held

    def _held_length(self, text: str) -> int:
        """Length of the longest suffix of the text that is a prefix of a marker."""
        for length in range(min(self.longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(marker.startswith(end) for marker in self.markers):
                return length
        return 0
