"""Host memory in slots of a block each, all layers of a block side by side."""

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from quire.platforms.host_claims import HeldClaim

logger = logging.getLogger("quire")

# Pinned at once. Torch rounds up to a power of two: the smallest of these that slots nearly fill.
PART_BYTES, MIN_FILLED = (1 << 26, 1 << 27, 1 << 28), 0.95
# Pauses, of the time that a part took: the driver holds up launches while it pins, and whoever asks again at once is
# served before those who wait (seen: a first token after two seconds).
PAUSES = 2


class HostMemory:
    """`parts` are tensors [slots, layers, page]. Pinned memory takes seconds to allocate, so a thread does it part by
    part, and slots can be used as their part is there."""

    def __init__(
        self,
        pages: Sequence[torch.Tensor],
        num_slots: int,
        pinned: bool,
        claim: Callable[[int], HeldClaim] | None = None,
    ) -> None:
        """`claim` gets the bytes that are to be pinned; there are no more slots than it grants."""
        self.shape = (len(pages), *pages[0].shape[1:])
        self.dtype = pages[0].dtype
        self.slot_bytes = int(np.prod(self.shape)) * self.dtype.itemsize
        self.parts: list[torch.Tensor] = []
        self._thread: threading.Thread | None = None  # while it allocates
        self._wanted = threading.Event()  # by one that waits: no pauses from here on
        self._end: Callable[[], object] | None = None
        if not pinned:
            # numpy maps zero pages, which cost nothing until used.
            size = self.slot_bytes // self.dtype.itemsize * num_slots
            self.num_slots = self.slots_per_part = num_slots
            zeros = torch.from_numpy(np.zeros(size * self.dtype.itemsize, np.uint8)).view(self.dtype)
            self.parts.append(zeros.view(num_slots, *self.shape))
            return
        held = None
        if claim is not None:
            held = claim(num_slots * self.slot_bytes)
            if num_slots > (granted := held.size // self.slot_bytes):
                logger.warning("other engines claim host memory: a CPU tier of %.2f GiB", held.size / 2**30)
                num_slots = granted
        self.num_slots = num_slots
        self.slots_per_part = _slots_of_a_part(self.slot_bytes)
        sizes = [self.slots_per_part] * (num_slots // self.slots_per_part)
        sizes += [left] if (left := num_slots % self.slots_per_part) else []
        shapes, stop = [(size, *self.shape) for size in sizes], threading.Event()
        arguments = (self.parts, shapes, self.dtype, stop, self._wanted, held)
        self._thread = thread = threading.Thread(target=_pin, args=arguments, name="quire-pin-memory", daemon=True)
        thread.start()
        # A thread inside torch while the interpreter exits aborts the process.
        self._end = weakref.finalize(self, _stop, stop, self._wanted, thread, held)

    def close(self) -> None:
        """No more is allocated, nor claimed."""
        if self._end is not None:
            self._end()

    @property
    def num_ready(self) -> int:
        return min(len(self.parts) * self.slots_per_part, self.num_slots)  # every step asks, and parts are hundreds

    def runs(self, slots: np.ndarray) -> Iterator[tuple[int, torch.Tensor]]:
        """Views [n, layers, page] of neighbouring slots, each with the place of its first in `slots`."""
        part, offset = slots // self.slots_per_part, slots % self.slots_per_part
        starts = np.flatnonzero(np.diff(slots, prepend=-2) != 1)
        starts = np.union1d(starts, np.flatnonzero(np.diff(part, prepend=-1)))
        for start, stop in zip(starts, [*starts[1:], len(slots)], strict=True):
            first = int(offset[start])
            yield int(start), self._part(int(part[start]))[first : first + int(stop - start)]

    def _part(self, number: int) -> torch.Tensor:
        """Of several ranks one says which slots can be used: another may be a little behind."""
        while number >= len(self.parts):
            if self._thread is None or not self._thread.is_alive():
                raise RuntimeError("host memory for the KV cache could not be pinned")
            self._wanted.set()
            self._thread.join(0.001)
        return self.parts[number]


def _slots_of_a_part(slot_bytes: int) -> int:
    filled = [size for size in PART_BYTES if size // slot_bytes * slot_bytes >= MIN_FILLED * size]
    return max(1, (filled[0] if filled else PART_BYTES[-1]) // slot_bytes)


def _pin(
    parts: list[torch.Tensor],
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    stop: threading.Event,
    wanted: threading.Event,
    held: HeldClaim | None,
) -> None:
    used = 0
    try:
        for shape in shapes:
            if stop.is_set():
                return
            began = time.perf_counter()
            parts.append(torch.empty(shape, dtype=dtype, pin_memory=True))
            seconds = time.perf_counter() - began
            used += parts[-1].nbytes
            if held is not None:
                held.use(used)
            if len(parts) < len(shapes):
                wanted.wait(PAUSES * seconds)
    except RuntimeError as error:
        logger.warning("host memory for the KV cache: %d of %d parts pinned: %s", len(parts), len(shapes), error)
        if held is not None:
            held.settle(used)


def _stop(stop: threading.Event, wanted: threading.Event, thread: threading.Thread, held: HeldClaim | None) -> None:
    stop.set()
    wanted.set()
    thread.join()
    if held is not None:
        held.release()
