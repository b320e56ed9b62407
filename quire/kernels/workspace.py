"""Device memory that launches share and leave as they found it."""

import functools
from typing import Any, Self

import torch


class Workspace:
    """One for each device and kind of workspace. Launches that share it must share a stream."""

    def __init__(self, device: torch.device) -> None:
        raise NotImplementedError

    @classmethod
    def of(cls, device: torch.device) -> Self:
        return _made(cls, device)  # type: ignore[arg-type]


@functools.cache
def _made(kind: type[Workspace], device: torch.device) -> Any:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # Inside a capture its counters would not be zeroed before the first replay.
        raise RuntimeError(f"the workspace of {kind.__module__} is needed before a CUDA graph is captured: prepare it")
    return kind(device)
