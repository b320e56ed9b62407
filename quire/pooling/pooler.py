"""Takes the hidden states of a step where the sampler takes logits, for rows that pool."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quire.kernels.transfer import to_device
from quire.messages.plan import NewRow, SchedulerOutput
from quire.messages.pooling_params import PoolingParams
from quire.pooling.heads import Heads
from quire.pooling.methods import Chunk, LastToken, PoolingMethod
from quire.pooling.registry import find_pooling_type, make_pooling_method


@dataclass(frozen=True, slots=True)
class PoolingKind:
    """Rows of equal kind are pooled together."""

    task: str
    pooling_type: str
    dimensions: int | None
    activation: bool
    columns: tuple[int, ...] = ()
    tokens: bool = False  # a vector for each token


@dataclass(slots=True)
class PromptProgress:
    kind: PoolingKind
    num_tokens: int
    next_position: int  # counted by the host: a prompt advances as planned
    kept: np.ndarray | None = None  # positions of the tokens that get a result; None: all


@dataclass(slots=True)
class Pooled:
    """Results of rows whose prompt is complete, at their places in the plan."""

    places: list[int]
    vectors: torch.Tensor  # [places, width], or [tokens of all, width]
    ends: list[int] | None  # of a result for each token: where those of a place end


def by_place(pooled: Sequence[Pooled], arrays: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
    """The results on the host; `arrays` are copies of the vectors."""
    found: dict[int, np.ndarray] = {}
    for one, array in zip(pooled, arrays, strict=True):
        parts = array if one.ends is None else np.split(array, one.ends[:-1])
        found.update(zip(one.places, parts, strict=True))
    return found


class Pooler:
    def __init__(self, heads: Heads | None = None) -> None:
        self.heads = heads or Heads()
        self._rows: dict[int, PromptProgress] = {}
        self._methods: dict[str, PoolingMethod] = {}

    def add_row(self, new: NewRow) -> None:
        params = new.pooling
        if params is None:
            return
        kind = self._kind(params)
        if kind.pooling_type not in self._methods:
            self._methods[kind.pooling_type] = make_pooling_method(kind.pooling_type)
        kept = self._kept(kind, params, new.token_ids) if kind.tokens else None
        self._rows[new.row] = PromptProgress(kind, new.num_prompt_tokens, new.num_computed, kept)

    def _kind(self, params: PoolingParams) -> PoolingKind:
        task = params.task or "embed"
        name = params.pooling_type or self.heads.pooling_type(task)
        tokens = find_pooling_type(name).tokens
        columns = tuple(params.returned_token_ids or ())
        return PoolingKind(task, name, params.dimensions, params.use_activation is not False, columns, tokens)

    def _kept(self, kind: PoolingKind, params: PoolingParams, token_ids: np.ndarray) -> np.ndarray | None:
        setup = self.heads.setup
        if kind.pooling_type == "STEP" and params.step_tag_id is not None:
            return np.flatnonzero(token_ids == params.step_tag_id)
        first = int(setup is not None and kind.task in setup.skip_first)
        last = int(setup is not None and kind.task in setup.skip_last)
        return np.arange(first, max(first, len(token_ids) - last)) if first or last else None

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

    def reads_last_tokens(self, plan: SchedulerOutput) -> bool:
        """Whether every row pools, and reads no hidden state but that of its last token in the step."""
        prompts = [self._rows.get(row) for row in plan.rows.tolist()]
        # Not a plugin's subclass, which may read more.
        return all(one is not None and type(self._methods[one.kind.pooling_type]) is LastToken for one in prompts)

    def pool(self, plan: SchedulerOutput, hidden: torch.Tensor, of_last: bool = False) -> list[Pooled]:
        """hidden [N or more, hidden] of the plan's tokens -> results of rows whose prompt is complete now, by kind.
        `of_last`: `hidden` has each row's last token alone, which must be all that is read."""
        if not self._rows:
            return []
        chunks: defaultdict[PoolingKind, list[Chunk]] = defaultdict(list)
        places: defaultdict[PoolingKind, list[int]] = defaultdict(list)
        first = 0
        rows = plan.rows.tolist()
        for place, (row, count) in enumerate(zip(rows, plan.num_tokens.tolist(), strict=True)):
            prompt = self._rows.get(row)
            if prompt is not None:
                start = prompt.next_position
                prompt.next_position += count
                is_last = prompt.next_position == prompt.num_tokens
                chunks[prompt.kind].append(Chunk(row, first, 1 if of_last else count, start, is_last))
                if is_last:
                    places[prompt.kind].append(place)
            first += 1 if of_last else count
        pooled = [(kind, self._methods[kind.pooling_type].pool(hidden, found)) for kind, found in chunks.items()]
        return [
            self._finished(kind, places[kind], [self._rows[rows[place]] for place in places[kind]], vectors)
            for kind, vectors in pooled
            if places[kind]
        ]

    def _finished(
        self, kind: PoolingKind, places: list[int], prompts: list[PromptProgress], vectors: torch.Tensor
    ) -> Pooled:
        ends = None
        if kind.tokens:
            vectors, ends = _kept_tokens(prompts, vectors)
        result = self.heads.finish(vectors, kind.task, kind.dimensions, kind.activation, kind.columns)
        return Pooled(places, result, ends)


def _kept_tokens(prompts: list[PromptProgress], vectors: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Of the tokens of all prompts those that get a result, and where those of each prompt end."""
    if all(prompt.kept is None for prompt in prompts):
        return vectors, np.cumsum([prompt.num_tokens for prompt in prompts]).tolist()
    firsts = np.cumsum([0, *(prompt.num_tokens for prompt in prompts)])
    kept = [
        first + (prompt.kept if prompt.kept is not None else np.arange(prompt.num_tokens))
        for first, prompt in zip(firsts, prompts, strict=False)
    ]
    (where,) = to_device(vectors.device, np.concatenate(kept), dtype=np.int64)
    return vectors[where], np.cumsum([len(one) for one in kept]).tolist()
