"""Allocates KV-cache blocks for requests, in all groups at once, and finds cached blocks that hold their prefix."""

import math
from dataclasses import dataclass, field

import numpy as np

from quire.config.values import INT32_MAX
from quire.core.block_pool import BlockPool, KVCacheBlock
from quire.core.hashing import BlockHasher, make_digest
from quire.core.kv_groups import FullAttentionGroup, SlidingWindowGroup, cdiv, make_group
from quire.core.measured_pool import MeasuredBlockPool
from quire.core.request import Request
from quire.distributed.kv_event_recorder import KVEventRecorder
from quire.messages.kv_cache import KVCacheConfig
from quire.messages.plan import BlockAppends


@dataclass(slots=True)
class Hit:
    """Leading tokens that need not be computed, and the blocks that hold them, per group."""

    num_tokens: int = 0
    blocks: list[list[KVCacheBlock]] = field(default_factory=list)


class KVCacheManager:
    def __init__(
        self,
        config: KVCacheConfig,
        *,
        enable_caching: bool = True,
        root: bytes = b"",
        hash_algorithm: str = "sha256",
        residency_sample: float | None = None,
        recomputes_last_block: bool = False,
    ) -> None:
        """`residency_sample`: the part of blocks of which is measured how long they stay. `recomputes_last_block`: hits
        are a block shorter than what is cached."""
        self.pool = BlockPool(config.num_blocks)
        if residency_sample is not None:
            self.pool = MeasuredBlockPool(config.num_blocks, residency_sample)
        sizes = [group.spec.block_size for group in config.groups]
        hash_size = math.gcd(*sizes)
        self.alignment = math.lcm(*sizes)
        self.groups = [make_group(i, g.spec, self.pool, hash_size) for i, g in enumerate(config.groups)]
        self.window_groups = [group for group in self.groups if isinstance(group, SlidingWindowGroup)]
        caching = enable_caching and config.chunkable
        self.hasher = BlockHasher(hash_size, root, make_digest(hash_algorithm)) if caching else None
        self.recomputes_last_block = recomputes_last_block
        self.events: KVEventRecorder | None = None  # hears what is registered
        # Not to be found by the plan that is being made.
        self._deferred: list[tuple[Request, np.ndarray, FullAttentionGroup, int]] = []
        self.prefix_queries = 0
        self.prefix_hits = 0

    def no_hit(self) -> Hit:
        return Hit(0, [[] for _ in self.groups])

    def find_hit(self, request: Request) -> Hit:
        """The longest cached prefix, leaving at least one token to compute."""
        num_tokens = len(request.token_ids)
        if self.hasher is None:
            return self.no_hit()
        self.hasher.extend(
            request.block_hashes, request.token_ids, num_tokens, request.extra_keys, request.core.content_keys
        )
        hashes = request.block_hashes
        length = self._longest_hit(hashes, num_tokens - 1)
        if self.recomputes_last_block and length:
            # A head that predicts from hidden states has, at a position, keys and values of the token after it. Those
            # at the end of the last block belong to a token that its hash does not name. Without that block, the token
            # after the last position kept is in a block that was found, so that it is the right one; unless the kept
            # block was first computed before another one: that can cost drafts, and never changes a token.
            length = self._longest_hit(hashes, length - self.alignment)
        return Hit(length, [group.hit_blocks(hashes, length) for group in self.groups])

    def _longest_hit(self, hashes: list[bytes], length: int) -> int:
        """The most leading tokens, at most `length`, that all groups have."""
        before = -1
        if len(self.groups) == 1:
            length = before = self.groups[0].longest_hit(hashes, length, self.alignment)
        while length != before:
            # What one group lacks shortens the prefix for all; repeat until they agree.
            before = length
            for group in self.groups:
                length = group.longest_hit(hashes, length, self.alignment)
        return length

    def count_lookup(self, num_tokens: int, hit: Hit) -> None:
        """For the hit rate: a request of `num_tokens` was admitted with this hit."""
        if self.hasher is not None:
            self.prefix_queries += num_tokens
            self.prefix_hits += hit.num_tokens

    def allocate(self, request: Request, num_tokens: int, hit: Hit | None = None, next_query: int = 0) -> bool:
        """Extend the request's blocks (after those of `hit`) to hold `num_tokens`; False if they do not suffice.

        Blocks that no query from `next_query` on reads are left out.
        """
        held = [len(blocks) for blocks in request.blocks]
        if hit is not None:
            held = [n + len(blocks) for n, blocks in zip(held, hit.blocks, strict=True)]
        missing = []
        for group, have in zip(self.groups, held, strict=True):
            skipped = max(0, group.first_needed(next_query) - have)
            missing.append((skipped, max(0, cdiv(num_tokens, group.block_size) - have - skipped)))
        if not self.pool.has_room(sum(count for _, count in missing), () if hit is None else hit.blocks):
            return False
        if hit is not None:
            for blocks, found in zip(request.blocks, hit.blocks, strict=True):
                self.pool.touch(found)
                blocks.extend(found)
        for blocks, (skipped, count) in zip(request.blocks, missing, strict=True):
            blocks.extend([self.pool.null_block] * skipped)
            blocks.extend(self.pool.allocate(count))
        return True

    def append_blocks(self, request: Request, num_tokens: int, appended: BlockAppends) -> bool:
        """Extend a running request's blocks to hold `num_tokens`; False if they do not suffice."""
        before = [len(blocks) for blocks in request.blocks]
        if not self.allocate(request, num_tokens):
            return False
        for group, (start, blocks) in enumerate(zip(before, request.blocks, strict=True)):
            for position in range(start, len(blocks)):
                appended.add(request.row, group, position, blocks[position].id)
        return True

    def append_one_block(self, requests: list[Request], most_missing: int, appended: BlockAppends) -> int:
        """The usual case in one allocation: running requests that lack up to `most_missing` tokens of room, all need
        one more block of the only group, and there are enough. The room each gained; 0 if it is not that case."""
        size = self.groups[0].block_size
        if len(self.groups) > 1 or most_missing > size or len(requests) > self.pool.num_free:
            return 0
        for request, block in zip(requests, self.pool.allocate(len(requests)), strict=True):
            blocks = request.blocks[0]
            appended.add(request.row, 0, len(blocks), block.id)
            blocks.append(block)
        return size

    def capacity(self, request: Request) -> int:
        """Tokens that the request's blocks can hold."""
        sizes = (len(b) * g.block_size for b, g in zip(request.blocks, self.groups, strict=True))
        return min(sizes, default=INT32_MAX)

    def fork(self, parent: Request, child: Request, num_tokens: int) -> list[tuple[int, int]] | None:
        """Share the parent's blocks of the prompt, but for its last token, and extend them to hold `num_tokens`;
        returns the block copies to make.

        None if blocks are short; a parent with freed blocks of the prompt cannot be forked (`can_fork`).
        """
        num_shared = child.num_prompt_tokens - 1
        shared: list[list[KVCacheBlock]] = []
        sources: list[KVCacheBlock | None] = []
        for group, blocks in zip(self.groups, parent.blocks, strict=True):
            full = num_shared // group.block_size
            shared.append(blocks[:full])
            sources.append(blocks[full] if num_shared % group.block_size else None)
        # The copied block is a fresh one of the child's own: allocate() supplies it, as the block after the shared
        # ones.
        if not self.allocate(child, num_tokens, Hit(num_shared, shared), num_shared):
            return None
        return [
            (source.id, blocks[len(kept)].id)
            for source, blocks, kept in zip(sources, child.blocks, shared, strict=True)
            if source is not None
        ]

    def can_fork(self, parent: Request, child: Request) -> bool:
        num_tokens = child.num_prompt_tokens - 1
        return (
            num_tokens > 0
            and all(group.can_fork(num_tokens) for group in self.groups)
            and all(
                blocks[i] is not self.pool.null_block
                for group, blocks in zip(self.groups, parent.blocks, strict=True)
                for i in range(group.first_needed(num_tokens), cdiv(num_tokens, group.block_size))
            )
        )

    def newly_full(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Places at which a block becomes full between `start` and `stop` tokens, if blocks are cached at all."""
        if self.hasher is None:
            return np.empty(0, np.int64)
        size = self.hasher.block_size
        return np.flatnonzero(stop // size > start // size)

    def register(self, request: Request, token_ids: np.ndarray, start: int, stop: int, admitting: bool = False) -> None:
        """Make the blocks that became full between `start` and `stop` tokens findable. token_ids[:stop] are
        confirmed. `admitting`: the plan that fills them still looks for hits."""
        if self.hasher is None:
            return
        self.hasher.extend(request.block_hashes, token_ids, stop, request.extra_keys, request.core.content_keys)
        for group in self.groups:
            size, blocks, null = group.block_size, request.blocks[group.index], self.pool.null_block
            for i in range(start // size, stop // size):
                # Those that were found, in a prompt's first plan nearly all, can be found already.
                block = blocks[i]
                if block.key is None and block is not null:
                    if admitting and not group.found_by_same_plan:
                        self._deferred.append((request, token_ids, group, i))
                    else:
                        self._register(request, token_ids, group, i)

    def _register(self, request: Request, token_ids: np.ndarray, group: FullAttentionGroup, position: int) -> None:
        assert self.hasher is not None
        size, hashes = group.block_size, request.block_hashes
        start, per_block = position * size, size // self.hasher.block_size
        key = (hashes[(position + 1) * per_block - 1], group.index)
        if self.pool.register(request.blocks[group.index][position], key) and self.events is not None:
            parent = hashes[position * per_block - 1] if position else None
            self.events.stored(request.core, key, parent, token_ids[start : start + size], start)

    def register_deferred(self) -> None:
        """The plan looks for no more hits."""
        for deferred in self._deferred:
            self._register(*deferred)
        self._deferred.clear()

    def window_start(self, next_query: np.ndarray) -> np.ndarray:
        """Per windowed group and row, the first block that a query at position `next_query` or later reads."""
        return np.stack([group.first_needed_by_row(next_query) for group in self.window_groups])

    def free_out_of_window(self, request: Request, next_query: int) -> None:
        for group in self.window_groups:
            blocks = request.blocks[group.index]
            freed = []
            for i in range(min(group.first_needed(next_query), len(blocks)) - 1, -1, -1):
                if blocks[i] is self.pool.null_block:
                    break  # all before it were freed earlier
                freed.append(blocks[i])
                blocks[i] = self.pool.null_block
            self.pool.free(freed)

    def free(self, request: Request) -> None:
        """Free all blocks; the tail of the request is evicted first, since prefixes are shared and tails are not."""
        for blocks in request.blocks:
            self.pool.free(reversed(blocks))
            blocks.clear()

    def change_root(self, key: bytes) -> None:
        """Blocks are named anew from here on."""
        if self.hasher is not None and key:
            self.hasher.root = self.hasher.digest(self.hasher.root + key)

    def reset_prefix_cache(self) -> None:
        """Evict all content. Requests that run keep their blocks."""
        self.pool.unregister_all()
        if self.events is not None:
            self.events.cleared()

    def common_prefix_blocks(self, requests: list[Request]) -> tuple[int, ...]:
        """Per group, how many leading blocks hold the same content for all the requests; 0 where a window frees
        leading blocks."""
        if len(requests) < 2:
            return (0,) * len(self.groups)
        return tuple(
            0 if group.window is not None else _common_length([request.blocks[group.index] for request in requests])
            for group in self.groups
        )


def _common_length(tables: list[list[KVCacheBlock]]) -> int:
    """By bisection: a block is shared under its chained hash or by a fork, so two tables with the same block somewhere
    have the same content before it. Not always in the same blocks: a request that computed a prefix again, for
    prompt logprobs say, keeps its copy of what was cached. That can only make the count smaller, and either copy may
    be read."""
    first, *others = tables
    count = len(first)
    for blocks in others:
        low, high = 0, min(count, len(blocks))
        while low < high:
            middle = (low + high + 1) // 2
            if blocks[middle - 1] is first[middle - 1]:
                low = middle
            else:
                high = middle - 1
        count = low
        if count == 0:
            break
    return count
