"""Reasoning before the final output is unconstrained; the grammar applies after the end tag."""

from collections.abc import Callable

from quire.messages.sampling_params import ReasoningTokens


class ReasoningGate:
    """Finds the end tag in the bytes of tokens: a tag that is no single token may be split over several, or share one
    with other text."""

    def __init__(self, reasoning: ReasoningTokens, token_bytes: Callable[[int], bytes]) -> None:
        self.inside = reasoning.open is True
        # Allowed as the first token, beside those of the grammar. A start tag of several tokens is not: its first token
        # may also begin the final output.
        self.start = reasoning.start[0] if reasoning.open is None and len(reasoning.start) == 1 else None
        self._token_bytes = token_bytes
        self._end = b"".join(map(token_bytes, reasoning.end))
        self._tail = b""

    def consumes(self, token: int) -> bool:
        """Whether a sampled token belongs to the reasoning, not to the grammar."""
        if self.inside:
            text = self._tail + self._token_bytes(token)
            self.inside = self._end not in text
            self._tail = text[max(0, len(text) - len(self._end) + 1) :]
            return True
        self.inside, self.start = self.start is not None and token == self.start, None
        return self.inside
