"""Names of the blocks that hold a prefix's KV cache, in all groups: what a tier looks up, saves and loads."""

import math
from collections.abc import Callable
from itertools import repeat

from quire.messages.kv_cache import KVCacheConfig, KVCacheSpec

BlockKey = tuple[bytes, int]  # (hash of the block and all before it, KV-cache group)


# A block of a request's table, and the name of its content: group, position, key. A tuple: a prompt has hundreds.
KeyedBlock = tuple[int, int, BlockKey]


class _Group:
    def __init__(self, index: int, spec: KVCacheSpec, hash_size: int) -> None:
        self.index = index
        self.block_size = spec.block_size
        self.window = spec.window
        self._hashes_per_block = spec.block_size // hash_size

    def key(self, hashes: list[bytes], position: int) -> BlockKey:
        return hashes[(position + 1) * self._hashes_per_block - 1], self.index

    def hashes_of(self, hashes: list[bytes], first: int, stop: int) -> list[bytes]:
        """What names the content of blocks from `first` to `stop`."""
        count = self._hashes_per_block
        return hashes[(first + 1) * count - 1 : stop * count : count]

    def first_needed(self, next_query: int) -> int:
        """The first block that a query at position `next_query` or later reads."""
        return 0 if self.window is None else max(0, next_query - self.window + 1) // self.block_size


class BlockKeys:
    """As the cache's groups hit (core/kv_groups.py): full attention needs all blocks of a prefix, a window the last."""

    def __init__(self, layout: KVCacheConfig) -> None:
        sizes = [group.spec.block_size for group in layout.groups]
        self.hash_size = math.gcd(*sizes)
        self.alignment = math.lcm(*sizes)
        self._groups = [_Group(i, group.spec, self.hash_size) for i, group in enumerate(layout.groups)]

    def needed(self, hashes: list[bytes], start: int, stop: int) -> list[KeyedBlock]:
        """Blocks from `start` on that a request reads which goes on after `stop` tokens, both multiples of
        `alignment`, if it has those before `start`."""
        found: list[KeyedBlock] = []
        for index, first, keys in self.needed_by_group(hashes, start, stop):
            found += [(index, i, key) for i, key in enumerate(keys, first)]
        return found

    def needed_by_group(self, hashes: list[bytes], start: int, stop: int) -> list[tuple[int, int, list[BlockKey]]]:
        """The same as group, first position, keys."""
        found = []
        for group in self._groups:
            first = max(group.first_needed(stop), start // group.block_size)
            last_hashes = group.hashes_of(hashes, first, stop // group.block_size)
            found.append((group.index, first, list(zip(last_hashes, repeat(group.index)))))
        return found

    def every(self, hashes: list[bytes], start: int, stop: int) -> list[BlockKey]:
        """All blocks between `start` and `stop` tokens, whoever needs them."""
        return [
            group.key(hashes, i)
            for group in self._groups
            for i in range(start // group.block_size, stop // group.block_size)
        ]

    def longest(self, hashes: list[bytes], start: int, limit: int, held: Callable[[BlockKey], bool]) -> int:
        """The most leading tokens, at most `limit`, with which a request that has `start` of them can go on if it
        gets all of `needed` that are held; `start` if that is no more."""
        if start % self.alignment:
            return start
        stop, before = self._aligned(min(limit, len(hashes) * self.hash_size)), -1
        while stop != before:  # what one group lacks shortens the prefix for all
            before = stop
            for group in self._groups:
                stop = self._longest(group, hashes, start, stop, held)
        return max(start, stop)

    def _longest(
        self, group: _Group, hashes: list[bytes], start: int, stop: int, held: Callable[[BlockKey], bool]
    ) -> int:
        size, first = group.block_size, start // group.block_size
        if group.window is None:
            position = first
            for last in group.hashes_of(hashes, first, max(first, stop // size)):
                if not held((last, group.index)):
                    break
                position += 1
            return self._aligned(position * size)
        position = stop // size
        while position > max(first, group.first_needed(stop)):
            position -= 1
            if not held(group.key(hashes, position)):
                stop = self._aligned(position * size)
                position = stop // size
        return stop

    def _aligned(self, num_tokens: int) -> int:
        return num_tokens // self.alignment * self.alignment
