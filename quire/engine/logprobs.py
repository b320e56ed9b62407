"""Logprobs as users see them: an entry per position, or columns that hold all positions."""

from collections.abc import Iterable, MutableSequence
from dataclasses import dataclass, field
from typing import Any, NoReturn


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsOnePosition = dict[int, Logprob]  # by token id: the token itself first, then the others


@dataclass(slots=True)
class FlatLogprobs(MutableSequence[LogprobsOnePosition]):
    """Position i has the entries start_indices[i] to end_indices[i] of the columns: few objects however long the text
    is, which spares the garbage collector. Reads like a list of dicts; a position without logprobs is an empty one."""

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def append_columns(
        self,
        token_ids: Iterable[int],
        logprobs: Iterable[float],
        ranks: Iterable[int | None],
        decoded_tokens: Iterable[str | None],
    ) -> None:
        """One position."""
        self.start_indices.append(len(self.token_ids))
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.ranks += ranks
        self.decoded_tokens += decoded_tokens
        self.end_indices.append(len(self.token_ids))

    def append(self, value: LogprobsOnePosition | None) -> None:
        entries = (value or {}).values()
        self.append_columns(
            value or (),
            (entry.logprob for entry in entries),
            (entry.rank for entry in entries),
            (entry.decoded_token for entry in entries),
        )

    def __len__(self) -> int:
        return len(self.start_indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            part = FlatLogprobs()
            for i in range(*index.indices(len(self))):
                at = slice(self.start_indices[i], self.end_indices[i])
                columns = (self.token_ids, self.logprobs, self.ranks, self.decoded_tokens)
                part.append_columns(*(column[at] for column in columns))  # type: ignore[arg-type]
            return part
        return {
            self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i])
            for i in range(self.start_indices[index], self.end_indices[index])
        }

    def __add__(self, other: Iterable[LogprobsOnePosition]) -> "FlatLogprobs":
        both = self[:]
        both.extend(other)
        return both

    def _refuse(self) -> NoReturn:
        raise TypeError("flat logprobs can only be appended to")

    def __setitem__(self, index: Any, value: Any) -> None:
        self._refuse()

    def __delitem__(self, index: Any) -> None:
        self._refuse()

    def insert(self, index: int, value: Any) -> None:
        self._refuse()


SampleLogprobs = list[LogprobsOnePosition] | FlatLogprobs
PromptLogprobs = list[LogprobsOnePosition | None] | FlatLogprobs


def joined(earlier: SampleLogprobs | None, later: SampleLogprobs) -> SampleLogprobs:
    """Of a request's consecutive outputs."""
    both: Any = earlier
    return both + later if both else later
