"""Device memory that kernel launches share, and counters that every launch leaves at zero."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Self, TypeVar

import torch

T = TypeVar("T")


class Workspace:
    """Buffers of a kernel. Launches that use the same ones must share a stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._counters: list[torch.Tensor] = []

    def new_counters(self, count: int) -> torch.Tensor:
        """[count] int32 that every launch leaves at zero."""
        counters = torch.zeros(count, dtype=torch.int32, device=self.device)
        self._counters.append(counters)
        return counters

    @torch.inference_mode()
    def reset(self) -> None:
        """Zero the counters: a step that failed between two launches leaves them as they were, and the next launch
        would write where they point."""
        for counters in self._counters:
            counters.zero_()


class SharedWorkspace(Workspace):
    """One per kernel and device, for kernels that layers launch without an owner to pass it."""

    @classmethod
    def of(cls, device: torch.device) -> Self:
        found = _shared.get((cls, device))
        if found is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                # Inside a capture its counters would not be zeroed before the first replay.
                raise RuntimeError(
                    f"the workspace of {cls.__module__} is needed before a CUDA graph is captured: prepare it"
                )
            found = _shared[cls, device] = outside_pools(device, lambda: cls(device))
        assert isinstance(found, cls)
        return found


def outside_pools(device: torch.device, make: Callable[[], T]) -> T:
    """What the process keeps, made by a thread of its own. A thread that loads weights may allocate in their memory
    pool, which sleep mode unmaps while other engines compute."""

    def made() -> T:
        found = make()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # the caller's stream may be another one
        return found

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(made).result()


_shared: dict[tuple[type[SharedWorkspace], torch.device], SharedWorkspace] = {}


def reset_shared_workspaces() -> None:
    for workspace in _shared.values():
        workspace.reset()
