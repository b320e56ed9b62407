"""Counters that kernels leave at zero between launches."""

import weakref

import torch

_counters: list[weakref.ref[torch.Tensor]] = []


def zeroed_counters(count: int, device: torch.device) -> torch.Tensor:
    """[count] int32 that every launch leaves at zero."""
    counters = torch.zeros(count, dtype=torch.int32, device=device)
    _counters.append(weakref.ref(counters))
    return counters


@torch.inference_mode()
def reset_counters() -> None:
    """To zero, all of them: a step that failed between two launches has left them as they were, and the next would
    write where they point."""
    _counters[:] = [reference for reference in _counters if reference() is not None]
    for reference in _counters:
        counters = reference()
        if counters is not None:
            counters.zero_()
