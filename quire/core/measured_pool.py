"""A block pool that measures how long blocks stay in the cache (`--kv-cache-metrics`)."""

import random
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable

from quire.core.block_pool import BlockPool, KVCacheBlock
from quire.messages.requests import RESIDENCY_SECONDS


class SecondsCount:
    """Observations per bucket, and their sum."""

    def __init__(self) -> None:
        self.counts = [0] * (len(RESIDENCY_SECONDS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(RESIDENCY_SECONDS, seconds)] += 1
        self.sum += seconds


class MeasuredBlockPool(BlockPool):
    """Follows a sample of blocks, from their allocation to their next one."""

    def __init__(
        self,
        num_blocks: int,
        sample: float,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        super().__init__(num_blocks)
        self.sample = sample
        self._clock, self._draw = clock, draw
        self._uses: dict[int, list[float]] = {}  # times of the allocation and of later hits, by block
        self._lifetime, self._idle, self._reuse_gap = SecondsCount(), SecondsCount(), SecondsCount()

    def allocate(self, count: int) -> list[KVCacheBlock]:
        blocks, now = super().allocate(count), self._clock()
        for block in blocks:
            uses = self._uses.pop(block.id, None)
            if uses is not None:
                self._lifetime.add(now - uses[0])
                self._idle.add(now - uses[-1])
            if self._draw() < self.sample:
                self._uses[block.id] = [now]
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        blocks, now = list(blocks), self._clock()
        super().touch(blocks)
        for uses in (self._uses[block.id] for block in blocks if block.id in self._uses):
            if len(uses) > 1:
                self._reuse_gap.add(now - uses[-1])
            uses[1:] = [now]

    def unregister_all(self) -> None:
        super().unregister_all()
        self._uses.clear()

    @property
    def residency(self) -> tuple[tuple[float, ...], ...]:
        return tuple((*seen.counts, seen.sum) for seen in (self._lifetime, self._idle, self._reuse_gap))
