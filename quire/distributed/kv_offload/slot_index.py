"""Which slot of a tier's memory holds which block's content."""

from collections.abc import Sequence

from quire.distributed.kv_offload.block_keys import BlockKey
from quire.distributed.kv_offload.eviction import EvictionPolicy


class SlotIndex:
    """A slot is free, being written (its key is known, but cannot be loaded yet), or holds what its key names. One that
    is being read or written is never given to another key."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._held: dict[BlockKey, int] = {}  # slots whose content can be loaded
        self._writing: dict[BlockKey, int] = {}
        self._readers: dict[BlockKey, int] = {}  # of held keys
        self._free: list[int] = []  # the lowest last
        self._abandoned: dict[int, int] = {}  # slot -> readers and writers of content that was dropped
        self.num_slots = 0
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: BlockKey) -> bool:
        """Whether it is held or being written: there is no need to save it."""
        return key in self._held or key in self._writing

    def holds(self, key: BlockKey) -> bool:
        return key in self._held

    def grow(self, num_slots: int) -> None:
        """Slots up to `num_slots` can be used."""
        self._free = [*range(num_slots - 1, self.num_slots - 1, -1), *self._free]
        self.num_slots = max(self.num_slots, num_slots)
        self._policy.resize(self.num_slots)

    def write(self, keys: Sequence[BlockKey]) -> list[int]:
        """Slots for keys that are not here, as many as can be had, in ascending order: neighbours are copied at once.
        `written` makes them loadable."""
        slots = []
        for _ in keys:
            if not self._free:
                victim = self._policy.evict(self._readers)
                if victim is None:
                    break
                self.num_evicted += 1
                self._free.append(self._held.pop(victim))
            slots.append(self._free.pop())
        slots.sort()
        self._writing.update(zip(keys, slots, strict=False))
        return slots

    def written(self, key: BlockKey, slot: int) -> None:
        if self._writing.get(key) == slot:
            del self._writing[key]
            self._held[key] = slot
            self._policy.add(key)
        else:
            self._release(slot)

    def read(self, key: BlockKey) -> int:
        """The slot of a held key, which keeps its content until `done_reading`."""
        self._readers[key] = self._readers.get(key, 0) + 1
        self._policy.use(key)
        return self._held[key]

    def done_reading(self, key: BlockKey, slot: int) -> None:
        if self._held.get(key) != slot:
            self._release(slot)
            return
        self._readers[key] -= 1
        if not self._readers[key]:
            del self._readers[key]

    def use(self, key: BlockKey) -> bool:
        """It was hit, though on the device. False if it is not here."""
        self._policy.use(key)
        return key in self._held or key in self._writing

    def renew(self, key: BlockKey) -> None:
        """Let it stay longer than those renewed before."""
        self._policy.renew(key)

    def clear(self) -> None:
        """Drop all content. Slots that are being read or written are free when that has ended."""
        for key, slot in self._held.items():
            if key in self._readers:
                self._abandoned[slot] = self._readers[key]
            else:
                self._free.append(slot)
        self._abandoned.update((slot, 1) for slot in self._writing.values())
        self._free.sort(reverse=True)
        self._held, self._writing, self._readers = {}, {}, {}
        self._policy.clear()

    @property
    def num_busy(self) -> int:
        """Slots that are being read or written."""
        return len(self._readers) + len(self._writing) + len(self._abandoned)

    def _release(self, slot: int) -> None:
        self._abandoned[slot] -= 1
        if not self._abandoned[slot]:
            del self._abandoned[slot]
            self._free.append(slot)
