"""A grammar is for the answer; the reasoning before it is free."""

from collections.abc import Callable

from quire.messages.sampling_params import ReasoningTokens


class ReasoningGate:
    """Told by the bytes of tokens: an end tag that is no token of its own can be written with several, and with others
    beside other text."""

    def __init__(self, reasoning: ReasoningTokens, token_bytes: Callable[[int], bytes]) -> None:
        self.inside = reasoning.open is True
        # Allowed as the first token, beside the grammar's own. A start tag of several tokens is not: its first one may
        # as well begin an answer.
        self.start = reasoning.start[0] if reasoning.open is None and len(reasoning.start) == 1 else None
        self._token_bytes = token_bytes
        self._end = b"".join(map(token_bytes, reasoning.end))
        self._tail = b""

    def takes(self, token: int) -> bool:
        """Whether a token that was drawn is none of the grammar's."""
        if self.inside:
            text = self._tail + self._token_bytes(token)
            self.inside = self._end not in text
            self._tail = text[max(0, len(text) - len(self._end) + 1) :]
            return True
        self.inside, self.start = self.start is not None and token == self.start, None
        return self.inside
