"""The KV cache's blocks: how many requests hold each, which are free, and which hold the content of a known prefix."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

BlockKey = tuple[bytes, int]  # (hash of the block and all before it, KV-cache group)


class KVCacheBlock:
    __slots__ = ("id", "key", "next", "prev", "ref")

    def __init__(self, block_id: int) -> None:
        self.id = block_id
        self.ref = 0
        self.key: BlockKey | None = None  # set while the block can be found by its content
        self.prev: KVCacheBlock | None = None  # neighbours in the free list
        self.next: KVCacheBlock | None = None

    def __repr__(self) -> str:
        return f"KVCacheBlock({self.id}, ref={self.ref}, cached={self.key is not None})"


class BlockPool:
    """Every operation on a block is O(1).

    The free list is in eviction order. A free block keeps its content and its key until it is allocated again, so a
    later request may still find it.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.null_block = KVCacheBlock(0)  # stands for "no block here"; never written, never freed
        self.blocks = [self.null_block, *(KVCacheBlock(i) for i in range(1, num_blocks + 1))]
        self.num_free = num_blocks
        self.on_register: list[Callable[[int, BlockKey], None]] = []  # a block can be found by its content
        self.on_evict: list[Callable[[int, BlockKey], None]] = []  # before a block's content is lost
        self._cached: dict[BlockKey, KVCacheBlock] = {}
        self._head, self._tail = KVCacheBlock(-1), KVCacheBlock(-1)
        chain = [self._head, *self.blocks[1:], self._tail]
        for left, right in pairwise(chain):
            left.next, right.prev = right, left

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def residency(self) -> tuple[tuple[float, ...], ...]:
        """See SchedulerStats; not measured here."""
        return ()

    @property
    def usage(self) -> float:
        return 1.0 - self.num_free / self.num_blocks if self.num_blocks else 0.0

    def allocate(self, count: int) -> list[KVCacheBlock]:
        """Blocks with one owner each; what they held is evicted. The caller has checked `num_free`."""
        assert count <= self.num_free, "allocate() of more blocks than num_free"
        blocks = []
        for _ in range(count):
            block = self._head.next
            assert block is not None
            self._unlink(block)
            if block.key is not None:
                for listener in self.on_evict:
                    listener(block.id, block.key)
                self.unregister(block)
            block.ref = 1
            blocks.append(block)
        self.num_free -= count
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One more owner for each block; a free one is reused with its content."""
        for block in blocks:
            if block is self.null_block:
                continue
            if block.ref == 0:
                self._unlink(block)
                self.num_free -= 1
            block.ref += 1

    def free(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One owner less for each block, in the order in which they should be evicted."""
        for block in blocks:
            if block is self.null_block:
                continue
            assert block.ref > 0, f"{block} freed twice"
            block.ref -= 1
            if block.ref == 0:
                # An uncached block has no content to keep: it is reused before any cached one.
                if block.key is None:
                    self._link(self._head, block)
                else:
                    assert self._tail.prev is not None
                    self._link(self._tail.prev, block)
                self.num_free += 1

    def num_free_after_touch(self, blocks: Sequence[KVCacheBlock]) -> int:
        return self.num_free - sum(1 for b in blocks if b.ref == 0 and b is not self.null_block)

    def get(self, key: BlockKey) -> KVCacheBlock | None:
        return self._cached.get(key)

    def cached_prefix(self, hashes: Iterable[bytes], group: int) -> list[KVCacheBlock]:
        """The blocks with these hashes, up to the first that is not cached."""
        found: list[KVCacheBlock] = []
        get = self._cached.get
        for block_hash in hashes:
            block = get((block_hash, group))
            if block is None:
                break
            found.append(block)
        return found

    def register(self, block: KVCacheBlock, key: BlockKey) -> bool:
        """Let later requests find the block. False if equal content is cached already: that block stays the one to
        find."""
        if block.key is not None or key in self._cached:
            return False
        block.key = key
        self._cached[key] = block
        for listener in self.on_register:
            listener(block.id, key)
        return True

    def unregister(self, block: KVCacheBlock) -> None:
        if block.key is not None:
            del self._cached[block.key]
            block.key = None

    def unregister_all(self) -> None:
        """Evict all content. Blocks that had any are reused before those never used: their memory is resident."""
        for block in self._cached.values():
            block.key = None
            if block.ref == 0:
                self._unlink(block)
                self._link(self._head, block)
        self._cached.clear()

    def _unlink(self, block: KVCacheBlock) -> None:
        assert block.prev is not None and block.next is not None
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = None

    @staticmethod
    def _link(left: KVCacheBlock, block: KVCacheBlock) -> None:
        right = left.next
        assert right is not None
        left.next = right.prev = block
        block.prev, block.next = left, right
