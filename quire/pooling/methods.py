"""From the hidden states of a prompt's tokens to one vector, or to all of theirs. A prompt may be computed in several
chunks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from quire.kernels.sum_rows import sum_rows
from quire.kernels.transfer import to_device


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a step computes of a row's prompt."""

    row: int
    first: int  # where its hidden states begin among the step's
    count: int
    start: int  # position of its first token in the prompt
    is_last: bool


class PoolingMethod(Protocol):
    """Made without arguments. It may keep state by row until the last chunk of its prompt."""

    def pool(self, hidden: torch.Tensor, chunks: Sequence[Chunk]) -> torch.Tensor:
        """hidden [N, hidden], valid during this step -> [m, hidden] float32, for each last chunk, in their order; for
        each token of their prompts, if the type says so."""
        ...

    def remove_row(self, row: int) -> None:
        """Its request has left: with a result, aborted, or preempted."""
        ...


class LastToken:
    def pool(self, hidden: torch.Tensor, chunks: Sequence[Chunk]) -> torch.Tensor:
        return gather(hidden, [chunk.first + chunk.count - 1 for chunk in chunks if chunk.is_last])

    def remove_row(self, row: int) -> None:
        pass


class FirstToken:
    """Of models whose first token attends to all others."""

    def __init__(self) -> None:
        self._found: dict[int, torch.Tensor] = {}  # by row, [hidden]

    def pool(self, hidden: torch.Tensor, chunks: Sequence[Chunk]) -> torch.Tensor:
        begun = [chunk for chunk in chunks if chunk.start == 0]
        for chunk, vector in zip(begun, gather(hidden, [chunk.first for chunk in begun]), strict=True):
            self._found[chunk.row] = vector
        return stack([self._found[chunk.row] for chunk in chunks if chunk.is_last], hidden)

    def remove_row(self, row: int) -> None:
        self._found.pop(row, None)


class Mean:
    def __init__(self) -> None:
        self._sums: dict[int, torch.Tensor] = {}  # by row, [hidden] float32

    def pool(self, hidden: torch.Tensor, chunks: Sequence[Chunk]) -> torch.Tensor:
        totals = sum_rows(hidden, [chunk.first for chunk in chunks], [chunk.count for chunk in chunks])
        if all(chunk.is_last and not chunk.start for chunk in chunks):
            (counts,) = to_device(hidden.device, [chunk.count for chunk in chunks])
            return totals / counts[:, None]
        means = []
        for chunk, total in zip(chunks, totals, strict=True):
            if chunk.start:
                total += self._sums[chunk.row]
            if chunk.is_last:
                means.append(total / (chunk.start + chunk.count))
            else:
                self._sums[chunk.row] = total
        return stack(means, hidden)

    def remove_row(self, row: int) -> None:
        self._sums.pop(row, None)


class AllTokens:
    def __init__(self) -> None:
        self._before: dict[int, list[torch.Tensor]] = {}  # by row, of earlier chunks

    def pool(self, hidden: torch.Tensor, chunks: Sequence[Chunk]) -> torch.Tensor:
        found = []
        for chunk in chunks:
            part = hidden[chunk.first : chunk.first + chunk.count].float()
            if chunk.is_last:
                found += [*self._before.pop(chunk.row, ()), part]
            else:
                # A copy: the hidden states are valid during this step only.
                self._before.setdefault(chunk.row, []).append(part.clone() if part.dtype == hidden.dtype else part)
        return torch.cat(found) if found else hidden.new_empty(0, hidden.shape[1], dtype=torch.float32)

    def remove_row(self, row: int) -> None:
        self._before.pop(row, None)


def gather(hidden: torch.Tensor, places: list[int]) -> torch.Tensor:
    """A copy of these rows, in float32."""
    if len(places) == 1:  # without places to copy to the device, which takes as long as all else that follows
        return hidden[places[0] : places[0] + 1].to(torch.float32, copy=True)
    (where,) = to_device(hidden.device, places, dtype=np.int64)
    return hidden[where].float()


def stack(vectors: list[torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
    return torch.stack(vectors) if vectors else hidden.new_empty(0, hidden.shape[1], dtype=torch.float32)
