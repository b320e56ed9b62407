"""Leaves a service alone after failures, and tries again ever more rarely."""

import threading
import time
from collections.abc import Callable


class CircuitBreaker:
    """Closed, calls pass. After `failures` in a row it opens: none passes for a while, then one does; if that fails too
    the while is twice as long, up to `longest` seconds."""

    def __init__(
        self,
        failures: int = 3,
        first: float = 1.0,
        longest: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._failures, self._first, self._longest, self._clock = failures, first, longest, clock
        self._lock = threading.Lock()
        self._in_a_row = 0
        self._pause = 0.0
        self._until = 0.0
        self._trying = False
        self.num_opened = 0

    @property
    def is_open(self) -> bool:
        return self._pause > 0

    def allows(self) -> bool:
        """Whether a call may be made; `succeeded` or `failed` must follow."""
        with self._lock:
            if not self._pause:
                return True
            if self._trying or self._clock() < self._until:
                return False
            self._trying = True
            return True

    def succeeded(self) -> bool:
        """True if the service is back."""
        with self._lock:
            was_open = self._pause > 0
            self._in_a_row, self._pause, self._trying = 0, 0.0, False
            return was_open

    def failed(self) -> bool:
        """True if calls no longer pass, which they did before."""
        with self._lock:
            self._in_a_row += 1
            was_open, self._trying = self._pause > 0, False
            if not was_open and self._in_a_row < self._failures:
                return False
            self._pause = min(self._longest, 2 * self._pause or self._first)
            self._until = self._clock() + self._pause
            self.num_opened += not was_open
            return not was_open
