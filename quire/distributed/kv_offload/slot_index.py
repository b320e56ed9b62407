"""Which slot of a tier's memory holds which block's content."""

from collections.abc import Iterable, Sequence

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

    def written(self, keys: Sequence[BlockKey], slots: Sequence[int]) -> None:
        writing, held, add = self._writing, self._held, self._policy.add
        for key, slot in zip(keys, slots, strict=True):
            if writing.get(key) == slot:
                del writing[key]
                held[key] = slot
                add(key)
            else:
                self._release(slot)

    def read(self, keys: Sequence[BlockKey]) -> list[int]:
        """The slots of held keys, which keep their content until `done_reading`; the first is used last."""
        held, readers = self._held, self._readers
        slots = [held[key] for key in keys]
        for key in keys:
            readers[key] = readers.get(key, 0) + 1
        self._policy.use(reversed(keys))
        return slots

    def done_reading(self, keys: Sequence[BlockKey], slots: Sequence[int]) -> None:
        held, readers = self._held, self._readers
        for key, slot in zip(keys, slots, strict=True):
            if held.get(key) != slot:
                self._release(slot)
            elif readers[key] == 1:
                del readers[key]
            else:
                readers[key] -= 1

    def use(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """They were hit, though on the device, in this order. Those that are not here."""
        return [key for key in self._policy.use(keys) if key not in self._writing]

    def renew(self, keys: Iterable[BlockKey]) -> None:
        """Let them stay longer than those renewed before."""
        self._policy.renew(keys)

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
