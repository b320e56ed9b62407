"""The KV cache's blocks: how many requests hold each, which are free, and which hold the content of a known prefix."""

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat

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
        self.blocks = [self.null_block]  # and those that were allocated, and one more: a million takes a second to make
        self.num_free = num_blocks
        self.on_register: list[Callable[[int, BlockKey], None]] = []  # a block can be found by its content
        self.on_evict: list[Callable[[int, BlockKey], None]] = []  # before a block's content is lost
        self._cached: dict[BlockKey, KVCacheBlock] = {}
        self._head, self._tail = KVCacheBlock(-1), KVCacheBlock(-1)
        self._head.next, self._tail.prev = self._tail, self._head
        self._make_block(self._head)

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
        blocks, head, cached = [], self._head, self._cached
        for _ in range(count):
            block = head.next
            assert block is not None
            if block is self.blocks[-1]:
                self._make_block(block)
            right = block.next  # as _unlink
            assert right is not None
            head.next, right.prev = right, head
            block.prev = block.next = None
            key = block.key
            if key is not None:
                for listener in self.on_evict:
                    listener(block.id, key)
                del cached[key]
                block.key = None
            block.ref = 1
            blocks.append(block)
        self.num_free -= count
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One more owner for each block; a free one is reused with its content."""
        null, reused = self.null_block, 0
        for block in blocks:
            if block is null:
                continue
            if block.ref == 0:
                # As _unlink, whose call would cost as much: a long prefix has hundreds of blocks.
                left, right = block.prev, block.next
                assert left is not None and right is not None
                left.next, right.prev = right, left
                block.prev = block.next = None
                reused += 1
            block.ref += 1
        self.num_free -= reused

    def free(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One owner less for each block, in the order in which they should be evicted."""
        null, tail, freed = self.null_block, self._tail, 0
        for block in blocks:
            if block is null:
                continue
            assert block.ref > 0, f"{block} freed twice"
            block.ref -= 1
            if block.ref == 0:
                # An uncached block has no content to keep: it is reused before any cached one.
                if block.key is None:
                    self._link(self._head, block)
                else:  # as _link
                    last = tail.prev
                    assert last is not None
                    last.next = tail.prev = block
                    block.prev, block.next = last, tail
                freed += 1
        self.num_free += freed

    def has_room(self, count: int, touched: Sequence[Sequence[KVCacheBlock]]) -> bool:
        """Whether `count` blocks can be allocated once those `touched`, by group, have one more owner."""
        spare = self.num_free - count
        if spare >= sum(map(len, touched)):  # even if all of them are free now
            return True
        return spare >= sum(b.ref == 0 and b is not self.null_block for blocks in touched for b in blocks)

    def get(self, key: BlockKey) -> KVCacheBlock | None:
        return self._cached.get(key)

    def cached_prefix(self, hashes: Iterable[bytes], group: int) -> list[KVCacheBlock]:
        """The blocks with these hashes, up to the first that is not cached."""
        found: list[KVCacheBlock] = []
        for block in map(self._cached.get, zip(hashes, repeat(group))):
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

    def unregister_all(self) -> None:
        """Evict all content. Blocks that had any are reused before those never used: their memory is resident."""
        for block in self._cached.values():
            block.key = None
            if block.ref == 0:
                self._unlink(block)
                self._link(self._head, block)
        self._cached.clear()

    def _make_block(self, left: KVCacheBlock) -> None:
        """In the free list behind `left`, where it stands for all that were never allocated."""
        if len(self.blocks) <= self.num_blocks:
            self.blocks.append(KVCacheBlock(len(self.blocks)))
            self._link(left, self.blocks[-1])

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
