"""What core, worker and front end tell each other about drafts."""

from dataclasses import dataclass
from itertools import accumulate

import msgspec


@dataclass(frozen=True)
class DraftProfile:
    """What the worker's proposer and steps are like, for whoever plans drafts."""

    finds: bool = False  # rows may be without drafts, and results say so
    rests: bool = False  # it may miss steps: nothing of its own has to follow the text
    # Drafts of a row, equal for all rows of a step, with which steps are captured; empty: rows may differ.
    sizes: tuple[int, ...] = ()
    # (tokens, seconds) of steps in which no row has drafts, and in which all have; empty: not measured.
    plain: tuple[tuple[int, float], ...] = ()
    drafted: tuple[tuple[int, float], ...] = ()


class DraftStats(msgspec.Struct, frozen=True):
    """Since the engine's start; a draft is here what a row verifies in one step."""

    num_draft_tokens: int
    accepted: tuple[int, ...]  # number of drafts by how many of their tokens were accepted

    @property
    def num_drafts(self) -> int:
        return sum(self.accepted)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted_by_position)

    @property
    def accepted_by_position(self) -> list[int]:
        return list(accumulate(reversed(self.accepted[1:])))[::-1]

    def since(self, before: "DraftStats") -> "DraftStats":
        pairs = zip(self.accepted, before.accepted, strict=True)
        return DraftStats(self.num_draft_tokens - before.num_draft_tokens, tuple(a - b for a, b in pairs))

    def describe(self, seconds: float) -> str:
        """A line of the log, with vLLM's words, about that long; nothing where no drafts were verified."""
        count, verified, accepted = self.num_drafts, self.num_draft_tokens, self.num_accepted_tokens
        if not count:
            return ""
        rates = ", ".join(f"{position / count:.3f}" for position in self.accepted_by_position)
        return (
            f"\nSpecDecoding metrics: Mean acceptance length: {1 + accepted / count:.2f}, "
            f"Accepted throughput: {accepted / seconds:.2f} tokens/s, "
            f"Drafted throughput: {verified / seconds:.2f} tokens/s, Accepted: {accepted} tokens, "
            f"Drafted: {verified} tokens, Per-position acceptance rate: {rates}, "
            f"Avg Draft acceptance rate: {100 * accepted / verified:.1f}%"
        )
