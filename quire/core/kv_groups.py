"""How one KV-cache group looks for cached blocks, lays out new ones and frees old ones."""

import numpy as np

from quire.core.block_pool import BlockPool, KVCacheBlock
from quire.messages.kv_cache import (
    FullAttentionSpec,
    KVCacheSpec,
    LatentSpec,
    SlidingWindowSpec,
    StateSpec,
)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


class FullAttentionGroup:
    """Every token attends to all before it: a hit is a prefix without gaps, and no block is freed before the end."""

    window: int | None = None
    found_by_same_plan = True  # keys are written before any query of the plan reads them

    def __init__(self, index: int, spec: KVCacheSpec, pool: BlockPool, hash_size: int) -> None:
        self.index = index
        self.block_size = spec.block_size
        self.pool = pool
        self._hashes_per_block = spec.block_size // hash_size
        self._found: tuple[list[bytes], list[KVCacheBlock]] | None = None  # by the last `longest_hit`

    def cached_block(self, hashes: list[bytes], position: int) -> KVCacheBlock | None:
        """The block with the content of logical block `position`. A chained hash names it and all before it."""
        return self.pool.get((hashes[(position + 1) * self._hashes_per_block - 1], self.index))

    def longest_hit(self, hashes: list[bytes], num_tokens: int, alignment: int) -> int:
        """The most leading tokens, at most `num_tokens` and a multiple of `alignment`, that need not be computed."""
        blocks = self._cached_prefix(hashes, num_tokens // self.block_size)
        self._found = hashes, blocks
        return len(blocks) * self.block_size // alignment * alignment

    def hit_blocks(self, hashes: list[bytes], num_tokens: int) -> list[KVCacheBlock]:
        """The blocks of a hit of `num_tokens`, which `longest_hit` has just found."""
        count = num_tokens // self.block_size
        found, self._found = self._found, None
        if found is not None and found[0] is hashes and count <= len(found[1]):
            return found[1][:count]  # not looked up once more: a long prefix has hundreds
        return self._cached_prefix(hashes, count)

    def _cached_prefix(self, hashes: list[bytes], limit: int) -> list[KVCacheBlock]:
        step = self._hashes_per_block
        return self.pool.cached_prefix(hashes[step - 1 : limit * step : step], self.index)

    def first_needed(self, next_query: int) -> int:
        """The first logical block that a query at position `next_query` or later reads."""
        return 0

    def can_fork(self, num_tokens: int) -> bool:
        """Whether a copy of a request's blocks serves another that continues after `num_tokens` of them."""
        return True

    def max_blocks(self, max_model_len: int, max_step_tokens: int) -> int:
        """Blocks that one request can hold at a time."""
        return cdiv(max_model_len, self.block_size)


class SlidingWindowGroup(FullAttentionGroup):
    """A token attends to itself and the `window - 1` before it: a hit needs only its last blocks."""

    window: int

    def __init__(self, index: int, spec: KVCacheSpec, pool: BlockPool, hash_size: int) -> None:
        super().__init__(index, spec, pool, hash_size)
        assert spec.window is not None
        self.window = spec.window

    def longest_hit(self, hashes: list[bytes], num_tokens: int, alignment: int) -> int:
        run_end = num_tokens // alignment * alignment // self.block_size
        position = run_end
        while position > self.first_needed(run_end * self.block_size):
            position -= 1
            if self.cached_block(hashes, position) is None:
                run_end = position * self.block_size // alignment * alignment // self.block_size
                position = run_end
        return run_end * self.block_size

    def hit_blocks(self, hashes: list[bytes], num_tokens: int) -> list[KVCacheBlock]:
        first = self.first_needed(num_tokens)
        found = [self.cached_block(hashes, i) for i in range(first, num_tokens // self.block_size)]
        assert None not in found
        return [self.pool.null_block] * first + [block for block in found if block is not None]

    def first_needed(self, next_query: int) -> int:
        return max(0, next_query - self.window + 1) // self.block_size

    def first_needed_by_row(self, next_query: np.ndarray) -> np.ndarray:
        return np.maximum(next_query - self.window + 1, 0) // self.block_size

    def max_blocks(self, max_model_len: int, max_step_tokens: int) -> int:
        span = min(max_model_len, self.window - 1 + max_step_tokens)
        # One more: the span may begin inside a block.
        return min(cdiv(max_model_len, self.block_size), cdiv(span, self.block_size) + 1)


class StateGroup(SlidingWindowGroup):
    """A token needs the state after the one before it, which the page of that one's block holds: a window of two.

    A page is written by a scan of the whole step, so no row of the same step can begin from it.
    """

    found_by_same_plan = False

    def can_fork(self, num_tokens: int) -> bool:
        """Only from a checkpoint: the live page has advanced beyond it."""
        return num_tokens % self.block_size == 0


GROUP_CLASSES: dict[type[KVCacheSpec], type[FullAttentionGroup]] = {
    FullAttentionSpec: FullAttentionGroup,
    SlidingWindowSpec: SlidingWindowGroup,
    LatentSpec: FullAttentionGroup,
    StateSpec: StateGroup,
}


def register_group(spec: type[KVCacheSpec], group: type[FullAttentionGroup]) -> None:
    """For a kind of cache of one's own."""
    GROUP_CLASSES[spec] = group


def make_group(index: int, spec: KVCacheSpec, pool: BlockPool, hash_size: int) -> FullAttentionGroup:
    kind = GROUP_CLASSES.get(type(spec))
    if kind is None:
        raise ValueError(f"layers with a cache of kind {type(spec).__name__} are not served yet")
    return kind(index, spec, pool, hash_size)
