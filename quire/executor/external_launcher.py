"""This process is one of several that torchrun started, each with an engine of its own.

All get the same requests in the same order, so their schedulers make the same plans. What they learn from outside must
be the same too: sampled tokens and errors come from one rank, memory is the least of all.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import pickle
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from quire.config import EngineConfig
from quire.config.environment import (
    GLOO_SOCKET_IFNAME,
    LAUNCHED,
    LOCAL_RANK,
    LOCAL_WORLD_SIZE,
    MASTER_ADDR,
    RANK,
    WORLD_SIZE,
)
from quire.distributed.machine import address_towards, free_port, interface_of
from quire.distributed.world import World
from quire.executor.adapter_news import NewsOfAll
from quire.executor.base import PendingOutput, WorkerMethod
from quire.executor.placement import gpu_of_each
from quire.executor.ranks import answering_rank, describe_layout, layout_of, refuse_connectors
from quire.executor.stages import memory_of_all, specs_of_all
from quire.executor.step_errors import WorkersLostError, rebuilt, told
from quire.executor.uniproc import UniProcExecutor
from quire.executor.worker_calls import pickled_error
from quire.executor.worker_messages import FromWorker, StepDone
from quire.messages.features import FeatureSupport
from quire.messages.kv_cache import KVCacheSpec
from quire.messages.lora import AdapterNews
from quire.messages.plan import GrammarMask, ModelRunnerOutput, SchedulerOutput
from quire.messages.protocol import Codec
from quire.platforms import cpu_cores, platform_class
from quire.worker.worker import Worker

_engines = itertools.count()  # of this process, and of every other: each has a place of its own to meet at


class SharedOutput:
    """Waits for this rank's part of a step, and then for what the rank that answers has to say."""

    def __init__(self, share: Callable[[PendingOutput], ModelRunnerOutput], pending: PendingOutput) -> None:
        self._share, self._pending = share, pending

    def result(self) -> ModelRunnerOutput:
        return self._share(self._pending)


class ExternalLauncherExecutor(UniProcExecutor):
    def __init__(self, config: EngineConfig) -> None:
        self._layout = layout_of(config)
        _check_environment(self._layout.size)
        refuse_connectors(config, "external_launcher")
        if config.speculative.adaptive and config.speculative.num_drafts:
            raise ValueError(
                "processes of an external launcher cannot plan speculation by the time that steps take, which differs "
                "among them: pass spec_adaptive=False"
            )
        timeout = config.parallel.distributed_timeout_seconds
        self._on_gpus = platform_class(config.device.device).has_own_memory
        config, backend = _with_device(config, self._on_gpus)
        rank = RANK.get()
        self._store, address = _meeting_place(rank, timeout)
        self._world = World.connect(rank, self._layout, address, backend, timeout, _local_rank(self._on_gpus))
        # Even without a call of shutdown(): torch's threads while the interpreter exits abort the process.
        self._close = weakref.finalize(self, self._world.close)
        self._group = self._world.host_group(timeout)
        self._answers = answering_rank(self._layout)
        self._encoder, self._decoder = Codec(), Codec(FromWorker)
        shown = config.load.use_tqdm_on_load and rank == 0
        config = config.replace(load=dataclasses.replace(config.load, use_tqdm_on_load=shown))
        self._loaded = False
        self._news = NewsOfAll()
        try:
            super().__init__(config, lambda config: Worker(config, self._world))
        except BaseException as error:
            self._everyones(f"{type(error).__name__}: {error}")
            self._close()
            raise
        self._loaded = True
        for other, cause in enumerate(self._everyones(None)):
            if cause is not None:
                self.shutdown()
                raise RuntimeError(f"rank {other} could not load the model: {cause}")

    def kv_cache_specs(self) -> dict[int, KVCacheSpec]:
        return specs_of_all(self._everyones(super().kv_cache_specs()))

    def kv_cache_memory(self) -> int:
        """What fits every rank. Those on the CPUs of a machine share its memory."""
        mine = super().kv_cache_memory() // (1 if self._on_gpus else LOCAL_WORLD_SIZE.get())
        memory, specs = self._everyones(mine), self._everyones(super().kv_cache_specs())
        return min(memory) if self._layout.stages == 1 else memory_of_all(memory, specs)

    def execute_model(self, plan: SchedulerOutput) -> None:
        if self._group.size > 1:
            self._check_plan(plan)
        super().execute_model(plan)

    def sample_tokens(self, grammar: GrammarMask | None = None) -> PendingOutput:
        pending = super().sample_tokens(grammar)
        return pending if self._group.size == 1 else SharedOutput(self._share, pending)

    def feature_support(self) -> FeatureSupport | None:
        support: FeatureSupport | None = self._everyones(super().feature_support())[0]
        return support

    def adapter_news(self) -> list[AdapterNews]:
        """Once it is every rank's: they plan by it."""
        return self._news.add(self._everyones(super().adapter_news()))

    def collective_rpc(self, method: WorkerMethod, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Every process has to make the same call."""
        try:
            mine, error = super().collective_rpc(method, args, kwargs), None
        except Exception as raised:
            mine, error = [None], pickled_error(raised)
        found = self._everyones((mine[0], error))
        for _, error in found:
            if error is not None:
                raise pickle.loads(error)
        return [value for value, _ in found]

    def describe(self) -> str:
        return f"{describe_layout(self._layout)} of an external launcher, each {super().describe()}"

    def shutdown(self) -> None:
        super().shutdown()
        if self._loaded:  # otherwise the others are told first
            self._close()

    def _check_plan(self, plan: SchedulerOutput) -> None:
        """Collectives of different plans would wait for one another."""
        digest = hashlib.blake2b(digest_size=8)
        for frame in self._encoder.encode(plan):
            digest.update(frame)
        mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64)
        if len(set(self._all_gather(mine).tolist())) > 1:
            raise WorkersLostError(
                f"processes of the external launcher have planned different steps {plan.step}: all must send the same "
                "requests in the same order"
            )

    def _share(self, pending: PendingOutput) -> ModelRunnerOutput:
        """Two collectives: how long each rank's message is, negative if its step failed; then one of them."""
        rank = self._group.rank
        try:
            output = pending.result()
            done = StepDone(rank, 0, output if rank == self._answers else None)
        except Exception as error:
            done = StepDone(rank, 0, error=told(error))
        message = msgspec.msgpack.encode([bytes(frame) for frame in self._encoder.encode(done)])
        length = len(message) if done.error is None else -len(message)
        lengths = self._all_gather(torch.tensor([length])).tolist()
        failed = [rank for rank, length in enumerate(lengths) if length < 0]
        source = failed[0] if failed else self._answers
        if rank == source:
            shared = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        else:
            shared = torch.empty(abs(lengths[source]), dtype=torch.uint8)
        frames = msgspec.msgpack.decode(self._broadcast(shared, source).numpy().tobytes(), type=list[bytes])
        found = self._decoder.decode(frames)
        if found.error is None:
            assert found.output is not None
            return found.output
        if len(failed) < self._group.size:
            cause = f"{found.error.kind}: {found.error.message}"
            raise WorkersLostError(f"a step failed on rank {source} and not on all others: {cause}")
        raise rebuilt(found.error)

    def _everyones(self, value: Any) -> list[Any]:
        """By rank. Pickled: these processes run one program of one user."""
        if self._group.size == 1:
            return [value]
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = self._all_gather(torch.tensor([len(mine)])).tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(mine)] = mine
        parts = self._all_gather(padded).view(self._group.size, -1)
        return [pickle.loads(part[:length].numpy().tobytes()) for part, length in zip(parts, lengths, strict=True)]

    def _all_gather(self, x: torch.Tensor) -> torch.Tensor:
        with _lost():
            return self._group.all_gather(x)

    def _broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        with _lost():
            return self._group.broadcast(x, source)


@contextlib.contextmanager
def _lost() -> Any:
    """A collective that fails cannot be repeated: the engine must end."""
    try:
        yield
    except RuntimeError as error:
        raise WorkersLostError(str(error)) from error


def _check_environment(ranks: int) -> None:
    start = f"torchrun --nproc-per-node {ranks} script.py"
    missing = [variable.name for variable in LAUNCHED if not variable.is_set()]
    if missing:
        raise ValueError(
            "distributed_executor_backend 'external_launcher' needs the environment of a launcher, which has no "
            f"{', '.join(missing)}: start your program as {start}"
        )
    if WORLD_SIZE.get() != ranks:
        raise ValueError(
            f"the launcher has started {WORLD_SIZE.get()} processes (WORLD_SIZE), but tensor_parallel_size x "
            f"pipeline_parallel_size is {ranks}; both must be the same: {start}"
        )


def _with_device(config: EngineConfig, on_gpus: bool) -> tuple[EngineConfig, str]:
    """The options of this rank, and how ranks exchange tensors."""
    here = LOCAL_WORLD_SIZE.get() if LOCAL_WORLD_SIZE.is_set() else WORLD_SIZE.get()
    device = config.device
    if on_gpus:
        gpus = gpu_of_each(here)
        return config, "nccl" if len(set(gpus)) == here else "gloo"
    threads = max(1, cpu_cores.choose_threads(device.cpu_threads) // here)
    return config.replace(device=dataclasses.replace(device, cpu_threads=threads, cpu_pin=False)), "gloo"


def _local_rank(on_gpus: bool) -> int:
    """On this machine: the number of its GPU."""
    local = LOCAL_RANK.get()
    here = LOCAL_WORLD_SIZE.get() if LOCAL_WORLD_SIZE.is_set() else WORLD_SIZE.get()
    return gpu_of_each(here)[local] if on_gpus else local


def _meeting_place(rank: int, timeout: float) -> tuple[dist.Store, str]:
    """The launcher's own store has keys of others: the first rank opens another and says so there. That store may end
    with the object that the first rank has."""
    host = MASTER_ADDR.get()
    if name := interface_of(address_towards(host)):
        GLOO_SOCKET_IFNAME.set_default(name)
    limit = timedelta(seconds=timeout)
    store, _, _ = next(dist.rendezvous("env://", rank, WORLD_SIZE.get(), timeout=limit))
    key = f"quire/{next(_engines)}"
    if rank == 0:
        store.set(key, str(free_port("")))
    store.wait([key], limit)
    return store, f"tcp://{host}:{store.get(key).decode()}"
