"""How one KV-cache group looks for cached blocks, lays out new ones and frees old ones."""

import numpy as np

from quire.core.block_pool import BlockPool, KVCacheBlock
from quire.messages.kv_cache import KVCacheSpec


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


class FullAttentionGroup:
    """Every token attends to all before it: a hit is a prefix without gaps, and no block is freed before the end."""

    def __init__(self, index: int, spec: KVCacheSpec, pool: BlockPool, hash_size: int) -> None:
        self.index = index
        self.block_size = spec.block_size
        self.window = spec.sliding_window
        self.pool = pool
        self._hashes_per_block = spec.block_size // hash_size

    def cached_block(self, hashes: list[bytes], position: int) -> KVCacheBlock | None:
        """The block with the content of logical block `position`. A chained hash names it and all before it."""
        return self.pool.get((hashes[(position + 1) * self._hashes_per_block - 1], self.index))

    def longest_hit(self, hashes: list[bytes], num_tokens: int, alignment: int) -> int:
        """The most leading tokens, at most `num_tokens` and a multiple of `alignment`, that need not be computed."""
        count = len(self._cached_prefix(hashes, num_tokens // self.block_size))
        return count * self.block_size // alignment * alignment

    def hit_blocks(self, hashes: list[bytes], num_tokens: int) -> list[KVCacheBlock]:
        """The blocks of a hit of `num_tokens`."""
        return self._cached_prefix(hashes, num_tokens // self.block_size)

    def _cached_prefix(self, hashes: list[bytes], limit: int) -> list[KVCacheBlock]:
        step = self._hashes_per_block
        return self.pool.cached_prefix(hashes[step - 1 : limit * step : step], self.index)

    def first_needed(self, next_query: int) -> int:
        """The first logical block that a query at position `next_query` or later reads."""
        return 0

    def max_blocks(self, max_model_len: int, max_step_tokens: int) -> int:
        """Blocks that one request can hold at a time."""
        return cdiv(max_model_len, self.block_size)


class SlidingWindowGroup(FullAttentionGroup):
    """A token attends to itself and the `window - 1` before it: a hit needs only its last blocks."""

    window: int

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


def make_group(index: int, spec: KVCacheSpec, pool: BlockPool, hash_size: int) -> FullAttentionGroup:
    kind = FullAttentionGroup if spec.sliding_window is None else SlidingWindowGroup
    return kind(index, spec, pool, hash_size)
