"""Outputs of encoders that the device keeps, as the scheduler counts them."""


class EncoderCache:
    """Encoder outputs on the device, by content hash, bounded in tokens; reference-counted."""

    def __init__(self, capacity: int, step_tokens: int) -> None:
        """At most `step_tokens` are encoded in a step, or a single output that is longer."""
        self.capacity = capacity
        self.step_tokens = step_tokens
        self.lengths: dict[bytes, int] = {}
        self.owners: dict[bytes, int] = {}
        self.evicted: list[bytes] = []  # which the worker still has
        self._unused: dict[bytes, None] = {}  # without owners, the oldest first
        self._new: set[bytes] = set()  # that no plan encodes yet
        self.num_tokens = 0  # of all outputs
        self._num_owned = 0  # of those with owners
        self._num_encoding = 0  # in the plan that is being made

    def acquire(self, key: bytes, length: int) -> bool:
        """Whether the output is there, or there is room and time in this step to make it."""
        if key not in self.lengths:
            too_many = self._num_encoding and self._num_encoding + length > self.step_tokens
            if too_many or self._num_owned + length > self.capacity:
                return False
            while self.num_tokens + length > self.capacity:
                self._evict(next(iter(self._unused)))
            self.lengths[key], self.owners[key] = length, 0
            self.num_tokens += length
            self._new.add(key)
            self._num_encoding += length
        self._unused.pop(key, None)
        self._num_owned += 0 if self.owners[key] else length
        self.owners[key] += 1
        return True

    def release(self, key: bytes) -> None:
        self.owners[key] -= 1
        if self.owners[key]:
            return
        self._num_owned -= self.lengths[key]
        if key in self._new:
            self._new.remove(key)
            self._num_encoding -= self.lengths[key]
            self._drop(key)
        else:
            self._unused[key] = None

    def begin_encoding(self, key: bytes) -> bool:
        """Whether the plan has to encode it: no plan before does."""
        found = key in self._new
        self._new.discard(key)
        return found

    def end_plan(self) -> list[bytes]:
        """What the worker is to free."""
        self._num_encoding = 0
        freed, self.evicted = self.evicted, []
        return freed

    def drop_unused(self) -> None:
        for key in list(self._unused):
            self._evict(key)

    def _evict(self, key: bytes) -> None:
        del self._unused[key]
        self._drop(key)
        self.evicted.append(key)

    def _drop(self, key: bytes) -> None:
        self.num_tokens -= self.lengths.pop(key)
        del self.owners[key]
