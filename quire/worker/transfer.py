"""Results from the device, without waiting for it."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Pending(Generic[T]):
    """A result that the device still computes. `make` builds it from the tensors once they are copied to the host."""

    def __init__(self, make: Callable[..., T], *tensors: torch.Tensor) -> None:
        self.on_failure: Callable[[Exception], None] | None = None  # called with what result() raises
        self._make = make
        self._event: torch.cuda.Event | None = None
        self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        if any(tensor.is_cuda for tensor in tensors):
            self._event = torch.cuda.Event()
            self._event.record()

    def result(self) -> T:
        try:
            if self._event is not None:
                self._event.synchronize()
            return self._make(*(tensor.numpy() for tensor in self._tensors))
        except Exception as error:
            if self.on_failure is not None:
                self.on_failure(error)
            raise
