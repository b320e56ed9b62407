"""Which block a full tier gives up: the least recently used (lru), or by recency and frequency (arc)."""

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable
from typing import Protocol

from quire.distributed.kv_offload.block_keys import BlockKey

Order = OrderedDict[BlockKey, None]  # the first is given up first


class EvictionPolicy(Protocol):
    """Knows the keys that a tier holds. A prefix has hundreds of them, which are used at once."""

    def add(self, key: BlockKey) -> None: ...

    def use(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """They were hit, in this order. Those that are not held are ignored, here and below; here they are told."""
        ...

    def renew(self, keys: Iterable[BlockKey]) -> None:
        """They are given up after all that were added or renewed before, without having been hit."""
        ...

    def discard(self, key: BlockKey) -> None: ...

    def evict(self, busy: Container[BlockKey]) -> BlockKey | None:
        """The key to give up, which is not held from now on; None if all are busy."""
        ...

    def resize(self, capacity: int) -> None:
        """So many blocks fit."""
        ...

    def clear(self) -> None: ...


class LRU:
    def __init__(self) -> None:
        self._order: Order = OrderedDict()

    def add(self, key: BlockKey) -> None:
        self._order[key] = None
        self._order.move_to_end(key)

    def use(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        missing, to_end = [], self._order.move_to_end
        for key in keys:
            try:
                to_end(key)
            except KeyError:
                missing.append(key)
        return missing

    def renew(self, keys: Iterable[BlockKey]) -> None:
        self.use(keys)

    def discard(self, key: BlockKey) -> None:
        self._order.pop(key, None)

    def evict(self, busy: Container[BlockKey]) -> BlockKey | None:
        return _pop_first(self._order, busy)

    def resize(self, capacity: int) -> None:
        pass

    def clear(self) -> None:
        self._order.clear()


class ARC:
    """Adaptive replacement (Megiddo and Modha, 2003): blocks hit once and blocks hit again are two queues. Keys that
    were given up lately are remembered; one that comes back says which queue was too short, and moves their target."""

    def __init__(self) -> None:
        self._capacity = 0
        self._target = 0.0  # of blocks seen once
        self._once: Order = OrderedDict()
        self._again: Order = OrderedDict()
        self._gone_once: Order = OrderedDict()  # given up; without content
        self._gone_again: Order = OrderedDict()

    def add(self, key: BlockKey) -> None:
        gone_once, gone_again = len(self._gone_once), len(self._gone_again)
        if key in self._gone_once:
            del self._gone_once[key]
            self._target = min(self._capacity, self._target + max(1.0, gone_again / gone_once))
            self._again[key] = None
        elif key in self._gone_again:
            del self._gone_again[key]
            self._target = max(0.0, self._target - max(1.0, gone_once / gone_again))
            self._again[key] = None
        elif key not in self._again:
            self._once[key] = None
        self._forget()

    def use(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        missing, once, again = [], self._once, self._again
        for key in keys:
            if key in again:
                again.move_to_end(key)
            elif key in once:
                del once[key]
                again[key] = None
            else:
                missing.append(key)
        return missing

    def renew(self, keys: Iterable[BlockKey]) -> None:
        once, again = self._once, self._again
        for key in keys:
            if key in again:
                again.move_to_end(key)
            elif key in once:
                once.move_to_end(key)

    def discard(self, key: BlockKey) -> None:
        self._once.pop(key, None)
        self._again.pop(key, None)

    def evict(self, busy: Container[BlockKey]) -> BlockKey | None:
        pairs = [(self._once, self._gone_once), (self._again, self._gone_again)]
        if len(self._once) <= self._target:
            pairs.reverse()
        for order, gone in pairs:
            key = _pop_first(order, busy)
            if key is not None:
                gone[key] = None
                self._forget()
                return key
        return None

    def resize(self, capacity: int) -> None:
        self._capacity = capacity

    def clear(self) -> None:
        for order in (self._once, self._again, self._gone_once, self._gone_again):
            order.clear()
        self._target = 0.0

    def _forget(self) -> None:
        """As many keys are remembered as fit: of those seen once so many that they fill the tier with those held."""
        while self._gone_once and len(self._once) + len(self._gone_once) > self._capacity:
            self._gone_once.popitem(last=False)
        held = len(self._once) + len(self._again)
        while self._gone_again and held + len(self._gone_once) + len(self._gone_again) > 2 * self._capacity:
            self._gone_again.popitem(last=False)


def _pop_first(order: Order, busy: Container[BlockKey]) -> BlockKey | None:
    for key in order:
        if key not in busy:
            del order[key]
            return key
    return None


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LRU, "arc": ARC}
