"""Handles Ctrl-C while an engine runs."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interruption() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether Ctrl-C was pressed, to check between steps: an exception within a step would
    lose its results.

    A second Ctrl-C raises KeyboardInterrupt, in case the step never ends.
    """
    pressed = False

    def on_signal(signum: int, frame: Any) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # only the main thread receives signals
        return
    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
