"""Ends waits for calls that may never return, such as those of a network file system whose server is gone."""

import threading
import time
from collections import deque
from collections.abc import Callable


class Deadlines:
    """Calls what it is given once `seconds` have passed, in a thread of its own. What is given must be quick, and do
    nothing if its wait has ended: it is called in any case."""

    def __init__(self, seconds: float, name: str = "quire-kv-deadlines") -> None:
        self.seconds = seconds
        self._name = name
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()  # in order: all wait as long
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, expire: Callable[[], None]) -> None:
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._waiting.append((time.monotonic() + self.seconds, expire))
            if len(self._waiting) == 1:
                self._changed.notify()

    def close(self) -> None:
        """Nothing is called any more."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify()

    def _run(self) -> None:
        while (expire := self._next()) is not None:
            expire()

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._closed:
                left = self._waiting[0][0] - time.monotonic() if self._waiting else None
                if left is not None and left <= 0:
                    return self._waiting.popleft()[1]
                self._changed.wait(left)
        return None
