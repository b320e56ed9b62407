"""Blocks whose content a tier is to save, until a plan can carry them."""

from quire.distributed.kv_offload.block_keys import BlockKey


class SaveQueue:
    """A block is registered while a plan is made, and has its content once that plan has run. So it is handed out with
    a later plan: the worker copies it before that plan changes anything, in the order of what wrote it.

    Blocks stay here as long as nothing overwrites them; one that is evicted is saved with the very plan that does so,
    or never. It can be: a block is not registered and evicted in the making of one plan.
    """

    def __init__(self) -> None:
        self.evicted: dict[BlockKey, int] = {}  # block ids; the plan that is being made overwrites them
        self._fresh: dict[BlockKey, int] = {}  # added since the last plan, which may not have run when the next is made
        self._ready: dict[BlockKey, int] = {}

    def __len__(self) -> int:
        return len(self._fresh) + len(self._ready) + len(self.evicted)

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def add(self, block_id: int, key: BlockKey) -> None:
        if key not in self._ready:
            self._fresh[key] = block_id

    def evict(self, block_id: int, key: BlockKey) -> bool:
        """Whether the block was here, and is now among `evicted`."""
        queue = self._ready if key in self._ready else self._fresh
        if queue.get(key) != block_id:
            return False
        self.evicted[key] = queue.pop(key)
        return True

    def take(self, limit: int | None = None) -> dict[BlockKey, int]:
        """At the end of a plan: those evicted, and of the others the oldest, `limit` at most."""
        taken = self.take_evicted()
        if limit is None or limit >= len(self._ready):
            taken |= self._ready
            self._ready, self._fresh = self._fresh, {}
            return taken
        for key in list(self._ready)[: max(0, limit)]:
            taken[key] = self._ready.pop(key)
        self._ready |= self._fresh
        self._fresh = {}
        return taken

    def take_evicted(self) -> dict[BlockKey, int]:
        taken, self.evicted = self.evicted, {}
        return taken

    def clear(self) -> None:
        self.evicted, self._fresh, self._ready = {}, {}, {}
