"""The attention backends of a model: one for each KV-cache group, several groups may share one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from quire.attention.base import CacheBackend, StepInputs
from quire.messages.kv_cache import KVCacheGroup


class GroupBackends:
    def __init__(self, by_group: Sequence[CacheBackend]) -> None:
        self.by_group = list(by_group)
        self.distinct = list(dict.fromkeys(by_group))
        self._place = [self.distinct.index(backend) for backend in by_group]
        # A step is captured or recorded as a whole.
        self.supports_graphs = bool(by_group) and all(backend.supports_graphs for backend in self.distinct)
        self.supports_replay = all(backend.supports_replay for backend in self.distinct)
        self.name = " and ".join(backend.name for backend in self.distinct) or "bidirectional"

    def pages_per_block(self, groups: Sequence[KVCacheGroup]) -> list[int]:
        """By group, how many of the kernels' pages a block of the allocator is."""
        return [
            _pages(group.spec.block_size, backend.max_page_tokens) if group.spec.scales else 1
            for group, backend in zip(groups, self.by_group, strict=True)
        ]

    def plan_queries(self, num_tokens: np.ndarray) -> list[np.ndarray | None]:
        """By distinct backend."""
        return [backend.plan_queries(num_tokens) for backend in self.distinct]

    def max_query_blocks(self, num_tokens: int, num_rows: int) -> list[int]:
        """By distinct backend."""
        return [backend.max_query_blocks(num_tokens, num_rows) for backend in self.distinct]

    def build(
        self,
        step: StepInputs,
        tables: Sequence[torch.Tensor],
        sizes: Sequence[int],
        query_blocks: Sequence[torch.Tensor | None] | None = None,
    ) -> list[Any]:
        """Metadata of a step, by group. `query_blocks`: by distinct backend; None: there are none."""
        steps = [step] * len(self.distinct)
        if query_blocks is not None and len(steps) == 1:
            step.query_blocks = query_blocks[0]
        elif query_blocks is not None:
            steps = [replace(step, query_blocks=blocks) for blocks in query_blocks]
        return [
            backend.build(steps[place], table, size)
            for backend, place, table, size in zip(self.by_group, self._place, tables, sizes, strict=True)
        ]

    def reset_workspaces(self) -> None:
        for backend in self.distinct:
            backend.reset_workspace()


def _pages(block_size: int, most: int | None) -> int:
    """The fewest equal pages of at most `most` tokens."""
    count = 1 if most is None else -(-block_size // most)
    while block_size % count:
        count += 1
    return count
