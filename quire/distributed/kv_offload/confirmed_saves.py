"""Blocks to be saved where nothing can be taken back: only once the plans that computed them have succeeded."""

from quire.distributed.kv_offload.block_keys import BlockKey


class ConfirmedSaves:
    """A block is registered while a plan is made; it is handed out with the first plan that is made after the results
    of that one have been applied, to be copied before that plan changes anything. What a failed plan, or one that was
    in flight behind it, should have written is never handed out: then everything here is cleared.
    """

    def __init__(self) -> None:
        self.num_dropped = 0  # evicted before they were confirmed
        self._fresh: dict[BlockKey, int] = {}  # block ids; registered since the last plan was made
        self._planned: list[tuple[int, dict[BlockKey, int]]] = []  # by step
        self._ready: dict[BlockKey, int] = {}
        self._evicted: dict[BlockKey, int] = {}  # of the ready ones, those that the plan being made overwrites

    def __bool__(self) -> bool:
        """Whether a plan is needed to get on: results of plans in flight come by themselves."""
        return bool(self._fresh or self._ready)

    def add(self, block_id: int, key: BlockKey) -> None:
        self._fresh[key] = block_id

    def evict(self, block_id: int, key: BlockKey) -> bool:
        """Whether the block is handed out now, at the latest possible time."""
        if self._ready.get(key) == block_id:
            self._evicted[key] = self._ready.pop(key)
            return True
        for waiting in (self._fresh, *(blocks for _, blocks in self._planned)):
            if waiting.get(key) == block_id:
                del waiting[key]
                self.num_dropped += 1
        return False

    def confirm(self, step: int) -> None:
        while self._planned and self._planned[0][0] <= step:
            self._ready |= self._planned.pop(0)[1]

    def take(self, step: int) -> dict[BlockKey, int]:
        """At the end of the plan of that step."""
        taken = self._evicted | self._ready
        self._evicted, self._ready = {}, {}
        if self._fresh:
            self._planned.append((step, self._fresh))
            self._fresh = {}
        return taken

    def clear(self) -> None:
        self._fresh, self._planned, self._ready, self._evicted = {}, [], {}, {}
