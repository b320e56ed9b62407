"""A worker's sleep: which memory it gives back at which level, and how it wakes."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from quire.config.environment import PYTORCH_ALLOC_CONF, PYTORCH_CUDA_ALLOC_CONF
from quire.kernels.workspace import reset_shared_workspaces
from quire.sleep_mode.memory import KV_CACHE, WEIGHTS, HostMemory, SleepMemory

logger = logging.getLogger("quire")

Tensors = Callable[[], Iterable[torch.Tensor]]


class SleepMode:
    """`memory` is None in an engine that was started without sleep mode: allocations are as without this."""

    def __init__(self, memory: SleepMemory | None) -> None:
        self._memory = memory
        self._weights: Tensors = tuple
        self._cache: Tensors = tuple
        self._others: Tensors = tuple
        self._asleep: dict[str, bool] = {}  # by tag: whether what it holds is kept
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def holds(self, weights: Tensors, others: Tensors, cache: Tensors) -> None:
        """The weights that an update could fill again, what else was allocated with them, and the KV cache."""
        self._weights, self._others, self._cache = weights, others, cache
        left = 0 if self._memory is None else self._memory.outside(WEIGHTS, weights())
        if left:
            logger.warning(
                "%.1f GiB of weights, which threads quantized while they read them, will stay on the device during "
                "sleep; with --load-threads 1 all weights leave it",
                left / 2**30,
            )

    def allocating(self, tag: str) -> AbstractContextManager[None]:
        return nullcontext() if self._memory is None else self._memory.allocating(tag)

    def sleep(self, level: int) -> None:
        """1: the weights are kept on the host. 2: they are discarded. The KV cache is in both cases."""
        began = time.perf_counter()
        if level == 2 and WEIGHTS not in self._asleep:
            self._copies = [(tensor, tensor.to("cpu", copy=True)) for tensor in self._others()]
        self._release(KV_CACHE, keep=False)
        self._release(WEIGHTS, keep=level == 1)
        logger.info("asleep (level %d) after %.2f s", level, time.perf_counter() - began)

    def discard_cache(self) -> None:
        self._release(KV_CACHE, keep=False)

    @torch.inference_mode()
    def wake(self, tags: Sequence[str]) -> None:
        began = time.perf_counter()
        for tag in tags:
            if tag in self._asleep and self._memory is not None:
                self._memory.restore(tag, [] if self._asleep[tag] else list(self._tensors(tag)))
                del self._asleep[tag]
        if WEIGHTS not in self._asleep:
            for tensor, copy in self._copies:
                tensor.copy_(copy)
            self._copies = []
            reset_shared_workspaces()  # should one have been allocated with the weights
        logger.info("awake (%s) after %.2f s", ", ".join(tags), time.perf_counter() - began)

    def _release(self, tag: str, keep: bool) -> None:
        if self._memory is None:
            raise ValueError("the engine was started without sleep mode (--enable-sleep-mode)")
        if tag not in self._asleep:
            self._asleep[tag] = keep  # first: waking up must undo what fails half-way
            self._memory.release(tag, [] if keep else list(self._tensors(tag)), keep)

    def _tensors(self, tag: str) -> Iterable[torch.Tensor]:
        return self._weights() if tag == WEIGHTS else self._cache()


def make_sleep_mode(enabled: bool, device: torch.device) -> SleepMode:
    if not enabled:
        return SleepMode(None)
    if device.type == "cpu":
        return SleepMode(HostMemory())
    refuse_expandable_segments()
    from quire.sleep_mode.cuda import CudaMemory
    from quire.sleep_mode.cuda_driver import Driver

    memory = CudaMemory(Driver(), device.index or 0)
    # The workspace that cuBLAS keeps for a thread: weights that are converted must not be the first to be multiplied.
    torch.mm(*torch.zeros(2, 16, 16, device=device))
    return SleepMode(memory)


def refuse_expandable_segments() -> None:
    """torch's own way to map memory, which leaves none to allocators of others."""
    for variable in (PYTORCH_ALLOC_CONF, PYTORCH_CUDA_ALLOC_CONF):
        settings = (setting.partition(":") for setting in variable.get().lower().replace(" ", "").split(","))
        if any(name == "expandable_segments" and value == "true" for name, _, value in settings):
            raise ValueError(
                f"sleep mode needs memory pools, which torch does not have with expandable segments; set "
                f"expandable_segments:False in {variable.name}, or leave out --enable-sleep-mode"
            )
