"""A worker's adapters: the layers that take one, those in host memory, and the copies in slots of the device."""

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import nn

from quire.config.lora import LoRAConfig
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.fused_moe import FusedMoE
from quire.layers.load_slot import ShardId
from quire.layers.packed_experts import PackedExperts
from quire.lora.factors import Adapter, FullShape, NewMemory, bits_of
from quire.lora.layers import AdaptableLinear, Target, adapt_embedding, adapt_experts, adapt_head, adapt_linear
from quire.lora.ready_memory import ReadyMemory
from quire.lora.staging import BUFFER_BYTES, Staging
from quire.lora.state import LoRAState
from quire.messages.lora import AdapterNews, LoRARequest

logger = logging.getLogger("quire")

TOUCHING_THREADS = 4  # where steps do not compute on the same cores

Key = tuple[str, ShardId]
# This worker's part of an adapter's factors, in the type of the slots.
HostFactors = dict[Key, tuple[torch.Tensor, torch.Tensor]]
Tasks = queue.SimpleQueue[Callable[[], None] | None]


class Adapters:
    """Changes the layers of a loaded model so that they add the terms of adapters.

    A thread of its own reads files and copies into slots: no step waits for either. It says so in `news`.
    """

    def __init__(
        self,
        model: nn.Module,
        read: Callable[[str, FullShape, NewMemory], Adapter],
        name_of: Callable[[str, ShardId], str],
        config: LoRAConfig,
        max_rows: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`read`: an adapter of a folder. `name_of`: a parameter's shard in the model's checkpoint. `max_rows` and
        `max_tokens`: the most that a step has."""
        self.state = LoRAState(config.max_loras, max_rows, max_tokens, device)
        self._read, self._name_of, self._max_rank = read, name_of, config.max_lora_rank
        self._config, self._dtype, self._device = config, dtype, device
        if config.lora_dtype not in ("auto", str(dtype).removeprefix("torch.")):
            raise ValueError(
                f"lora_dtype is {config.lora_dtype}; allowed: auto, or the model's, {dtype}".replace("torch.", "")
            )
        self._targets: dict[Key, Target] = {}
        left_out = set[nn.Module]()
        for path, module in list(model.named_modules()):
            if isinstance(module, FusedMoE | PackedExperts):
                left_out.update(module.modules())
                if config.adapt_experts:
                    for name, shard, target in adapt_experts(module, self.state, self._max_rank, self._dtype):
                        self._targets[f"{path}.{name}", shard] = target
            elif not getattr(module, "takes_adapters", True):
                left_out.update(module.modules())
            elif module not in left_out:
                self._adapt(path, module)
        if not self._targets:
            raise ValueError(f"{type(model).__name__} has no layers that take an adapter; leave out enable_lora")
        self._host: dict[int, HostFactors] = {}
        self._in_slot: dict[int, set[Key]] = {}  # what of each slot is not zero
        self._news: queue.SimpleQueue[AdapterNews] = queue.SimpleQueue()
        self._tasks: Tasks = queue.SimpleQueue()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._staging = _staging(self._stream) if self._stream is not None else None
        self._memory = ReadyMemory(1 if self._stream is None else TOUCHING_THREADS)
        self._asked: dict[int, float] = {}  # when adapters were that have no slot yet
        thread = threading.Thread(target=_run, args=(self._tasks,), name="quire-adapters", daemon=True)
        thread.start()
        self._stop = weakref.finalize(self, self._tasks.put, None)

    def _adapt(self, path: str, module: nn.Module) -> None:
        options = (self.state, self._max_rank, self._dtype)
        if isinstance(module, LMHead):
            found = adapt_head(module, *options) if self._takes(path, None, True) else iter(())
        elif isinstance(module, VocabEmbedding):
            found = adapt_embedding(module, *options) if self._takes(path, None, True) else iter(())
        elif isinstance(module, AdaptableLinear):
            head = getattr(module, "makes_logits", False)
            taken = [p.shard for p in module.partitions() if self._takes(path, p.shard, head)]
            found = adapt_linear(module, *options, head) if taken else iter(())
            found = ((shard, target) for shard, target in found if shard in taken)
        else:
            return
        self._targets.update({(path, shard): target for shard, target in found})

    def load(self, request: LoRARequest) -> None:
        """Read it into host memory, beside the steps."""
        self._asked[request.lora_int_id] = time.perf_counter()
        self._tasks.put(lambda: self._tell(request.lora_int_id, lambda: self._load(request)))

    def place(self, lora_id: int, slot: int) -> None:
        """Copy it into a slot, behind all steps that were launched before, and beside those that follow."""
        self.state.free_slot(slot)
        launched = None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

        def copy() -> AdapterNews:
            began = time.perf_counter()
            if self._stream is None or launched is None:
                self._copy(lora_id, slot)
            else:
                with torch.cuda.stream(self._stream):
                    self._stream.wait_event(launched)
                    self._copy(lora_id, slot)
                staged = time.perf_counter()
                self._stream.synchronize()
                told = (lora_id, 1e3 * (staged - began), _since(staged))
                logger.debug("adapter %d: staged in %.1f ms, uploaded %.1f ms later", *told)
            return AdapterNews(lora_id, slot=slot)

        self._tasks.put(lambda: self._tell(lora_id, copy, slot))
        self._tasks.put(self._prepare)

    def use(self, lora_id: int, slot: int) -> None:
        """Plans from here on may name it: its copy has ended."""
        self.state.take_slot(slot, lora_id)
        if (asked := self._asked.pop(lora_id, None)) is not None:
            logger.debug("adapter %d: in its slot %.1f ms after it was asked for", lora_id, _since(asked))

    def _prepare(self) -> None:
        """Memory for the next file, a part at a time behind all that waits."""
        if self._memory.prepare():
            self._tasks.put(self._prepare)

    def drop(self, lora_id: int) -> None:
        """Forget it in host memory."""

        self._asked.pop(lora_id, None)

        def forget() -> None:
            self._host.pop(lora_id, None)

        self._tasks.put(forget)

    def news(self) -> list[AdapterNews]:
        """Since the last call, which may come from any thread."""
        found = []
        while not self._news.empty():
            found.append(self._news.get())
        return found

    def _tell(self, lora_id: int, task: Callable[[], AdapterNews], slot: int | None = None) -> None:
        try:
            self._news.put(task())
        except (ValueError, OSError) as error:
            self._news.put(AdapterNews(lora_id, slot=slot, error=str(error)))
        except Exception as error:
            self._news.put(AdapterNews(lora_id, slot=slot, error=f"{type(error).__name__}: {error}"))

    def _load(self, request: LoRARequest) -> AdapterNews:
        began = time.perf_counter()
        adapter = self._read(request.lora_path, self._full_shape, self._memory.take)
        if adapter.rank > self._max_rank:
            raise ValueError(
                f"{request.lora_path}: its rank is {adapter.rank}; at most {self._max_rank} is allowed "
                "(--max-lora-rank)"
            )
        parts = {key: self._targets[key].part_of(own) for key, own in adapter.factors.items() if key in self._targets}
        arrays = [array for pair in parts.values() for array in pair]
        size = sum(array.nbytes for array in arrays)
        if not all(array.flags.c_contiguous for array in arrays) or _memory(arrays) > 1.1 * size:
            parts = {key: (a.copy(), b.copy()) for key, (a, b) in parts.items()}  # without the rest of the file
        else:
            self._memory.expect(_memory(arrays))
        self._host[request.lora_int_id] = {key: (self._kept(a), self._kept(b)) for key, (a, b) in parts.items()}
        asked = self._asked.get(request.lora_int_id, began)
        told = (request.lora_int_id, _since(began), size / 1e6, 1e3 * (began - asked))
        logger.debug("adapter %d: loaded in %.1f ms, %.0f MB, begun %.1f ms after it was asked for", *told)
        return AdapterNews(request.lora_int_id, adapter.content, size)

    def _copy(self, lora_id: int, slot: int) -> None:
        factors = self._host[lora_id]
        before = [self._targets[key] for key in self._in_slot.pop(slot, set())]
        _clear([values[slot] for target in before for values in (target.a, target.b)])
        _clear([target.ranks[slot] for target in before])
        self._in_slot[slot] = set(factors)
        ranks: dict[torch.Tensor, int] = {}  # the highest of layers that are one here
        for key, (a, b) in factors.items():
            target = self._targets[key]
            self._write(a, target.a[slot, : len(a)])
            self._write(b, target.b[slot, :, : len(a)])
            ranks[target.ranks] = max(ranks.get(target.ranks, 0), len(a))
        for of_layer, rank in ranks.items():
            of_layer[slot] = rank

    def _full_shape(self, layer: str, shard: ShardId) -> tuple[int, int] | None:
        target = self._targets.get((layer, shard))
        return None if target is None else target.partition.full_shape

    def _takes(self, layer: str, shard: ShardId, vocabulary: bool) -> bool:
        return self._config.takes(self._name_of(f"{layer}.weight", shard).removesuffix(".weight"), vocabulary)

    def _kept(self, bits: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(bits).view(self._dtype)

    def _write(self, values: torch.Tensor, slot: torch.Tensor) -> None:
        if self._staging is not None:
            self._staging.copy(values, slot)
        else:
            bits_of(slot)[...] = bits_of(values)


def _staging(stream: torch.cuda.Stream) -> Staging:
    """Shared by all adapters: it takes long to page-lock memory, and kernels are launched only after."""
    buffers = [torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    return Staging(buffers, lambda staged, out: out.copy_(staged, non_blocking=True), stream.record_event)


def _since(began: float) -> float:
    """Milliseconds."""
    return 1e3 * (time.perf_counter() - began)


def _memory(arrays: Iterable[np.ndarray]) -> int:
    """Bytes that these arrays keep from being freed."""
    owners = [array if array.base is None else array.base for array in arrays]
    return sum({id(owner): owner.nbytes for owner in owners}.values())


def _clear(slots: list[torch.Tensor]) -> None:
    if slots and slots[0].is_cuda:
        torch._foreach_zero_(slots)
        return
    for slot in slots:  # by numpy, which has no pool of threads
        bits_of(slot)[...] = 0


def _run(tasks: Tasks) -> None:
    """References only the queue, so that unreferenced adapters can be collected."""
    while (task := tasks.get()) is not None:
        try:
            task()
        except Exception:  # of what nobody waits for (`_tell`): the others' tasks go on
            logger.exception("adapters: a task failed")
        del task
