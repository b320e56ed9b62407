"""Takes the hidden states of a step where the sampler takes logits, for rows that pool."""

from collections import defaultdict
from dataclasses import dataclass

import torch

from quire.messages.plan import NewRow, SchedulerOutput
from quire.pooling.methods import Chunk, PoolingMethod
from quire.pooling.registry import DEFAULT_POOLING_TYPE, make_pooling_method


@dataclass(frozen=True, slots=True)
class PoolingKind:
    """Rows of equal kind are pooled together."""

    pooling_type: str
    dimensions: int | None
    normalize: bool


@dataclass(slots=True)
class PromptProgress:
    kind: PoolingKind
    num_tokens: int
    next_position: int  # counted by the host: a prompt advances as planned


class Pooler:
    def __init__(self) -> None:
        self._rows: dict[int, PromptProgress] = {}
        self._methods: dict[str, PoolingMethod] = {}

    def add_row(self, new: NewRow) -> None:
        params = new.pooling
        if params is None:
            return
        name = params.pooling_type or DEFAULT_POOLING_TYPE
        if name not in self._methods:
            self._methods[name] = make_pooling_method(name)
        kind = PoolingKind(name, params.dimensions, params.use_activation is not False)
        self._rows[new.row] = PromptProgress(kind, new.num_prompt_tokens, new.num_computed)

    def remove_row(self, row: int) -> None:
        prompt = self._rows.pop(row, None)
        if prompt is not None:
            self._methods[prompt.kind.pooling_type].remove_row(row)

    def needed(self, plan: SchedulerOutput) -> bool:
        """Whether some row of the plan pools."""
        return bool(self._rows) and not self._rows.keys().isdisjoint(plan.rows.tolist())

    def pools_all(self, plan: SchedulerOutput) -> bool:
        """Whether every row does, so that no logits are needed."""
        return bool(self._rows) and self._rows.keys() >= set(plan.rows.tolist())

    def pool(self, plan: SchedulerOutput, hidden: torch.Tensor) -> list[tuple[list[int], torch.Tensor]]:
        """hidden [N, hidden] of the plan's tokens. Places in the plan of rows whose prompt is complete now, with their
        vectors [places, dimensions] float32, by kind."""
        if not self._rows:
            return []
        chunks: defaultdict[PoolingKind, list[Chunk]] = defaultdict(list)
        places: defaultdict[PoolingKind, list[int]] = defaultdict(list)
        first = 0
        for place, (row, count) in enumerate(zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True)):
            prompt = self._rows.get(row)
            if prompt is not None:
                start = prompt.next_position
                prompt.next_position += count
                is_last = prompt.next_position == prompt.num_tokens
                chunks[prompt.kind].append(Chunk(row, first, count, start, is_last))
                if is_last:
                    places[prompt.kind].append(place)
            first += count
        vectors = [(kind, self._methods[kind.pooling_type].pool(hidden, found)) for kind, found in chunks.items()]
        return [(places[kind], _finished(kind, found)) for kind, found in vectors if places[kind]]


def _finished(kind: PoolingKind, vectors: torch.Tensor) -> torch.Tensor:
    """Shortened first: what is left is what has length 1."""
    vectors = vectors[:, : kind.dimensions]
    return torch.nn.functional.normalize(vectors, dim=1) if kind.normalize else vectors.contiguous()
