"""Ranks that another program starts, torchrun say: each runs the whole engine, with the same requests in one order.

Schedulers decide alike as long as they read the same results, so the rank that samples sends its own to all others.
"""

import dataclasses
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from quire.config import EngineConfig, environment
from quire.distributed.layout import WorldLayout
from quire.distributed.world import World
from quire.executor.base import PendingOutput
from quire.executor.step_errors import WorkersLostError, rebuilt, told
from quire.executor.uniproc import UniProcExecutor
from quire.executor.worker_messages import StepDone, joined_frames, split_frames
from quire.messages.plan import GrammarMask, ModelRunnerOutput
from quire.messages.protocol import Codec
from quire.platforms import cpu_cores, platform_class
from quire.worker.worker import Worker

KEY = "quire/address"  # in the launcher's store


class ExternalLauncherExecutor(UniProcExecutor):
    def __init__(self, config: EngineConfig) -> None:
        parallel = config.parallel
        if parallel.pipeline_parallel_size > 1:
            raise ValueError(
                "pipeline_parallel_size with external_launcher is not available yet; leave it out, or use 'mp' "
                "(--distributed-executor-backend)"
            )
        rank, size, local = (
            int(each.get()) for each in (environment.RANK, environment.WORLD_SIZE, environment.LOCAL_RANK)
        )
        if size != parallel.num_ranks:
            raise ValueError(
                f"the launcher has started {size} processes (WORLD_SIZE), but tensor_parallel_size is "
                f"{parallel.num_ranks}; they must be equal, as in torchrun --nproc-per-node {parallel.num_ranks}"
            )
        device = config.device
        if platform_class(device.device).has_own_memory:
            backend, device = "nccl", dataclasses.replace(device, device=f"cuda:{local}")
        else:
            environment.GLOO_SOCKET_IFNAME.set_default()
            threads = max(1, cpu_cores.choose_threads(device.cpu_threads) // size)
            backend, device = "gloo", dataclasses.replace(device, cpu_threads=threads, cpu_pin=False)
        timeout = parallel.distributed_timeout_seconds
        address = meeting_point(rank, size, timeout)
        self.world = World.connect(rank, WorldLayout(size), address, backend, timeout, local)
        super().__init__(config.replace(device=device), lambda config: Worker(config, self.world))

    def kv_cache_memory(self) -> int:
        """The least that any rank has. Ranks on a CPU share its memory."""
        device = self.worker.platform.device
        mine = super().kv_cache_memory() // (1 if self._platform.has_own_memory else self.world.size)
        return int(self.world.model.all_gather(torch.tensor([mine], device=device)).min())

    def sample_tokens(self, grammar: GrammarMask | None = None) -> PendingOutput:
        pending = super().sample_tokens(grammar)
        return pending if self.world.size == 1 else SharedOutput(pending, self.world, self.worker.platform.device)

    def describe(self) -> str:
        return f"rank {self.world.rank} of {self.world.size}, {super().describe()}"

    def shutdown(self) -> None:
        super().shutdown()
        self.world.close()


class SharedOutput:
    """The result of the rank that samples, on every rank."""

    def __init__(self, pending: PendingOutput, world: World, device: torch.device) -> None:
        self._pending, self._world, self._device = pending, world, device

    def result(self) -> ModelRunnerOutput:
        error: Exception | None = None
        done = StepDone(self._world.rank, 0)
        try:
            done.output = self._pending.result()
        except Exception as failure:
            error, done.error = failure, told(failure)
        common = self._broadcast(done)
        if common.error is not None:
            raise error or rebuilt(common.error)
        if error is not None:
            raise WorkersLostError(
                f"a step failed on rank {self._world.rank} and not on all others: {error}"
            ) from error
        assert common.output is not None
        return common.output

    def _broadcast(self, done: StepDone) -> StepDone:
        layout, group = self._world.layout, self._world.model
        source = layout.tensor * (layout.stages - 1)  # the first rank of the last stage
        data = joined_frames(Codec().encode(done)) if self._world.answers else b""
        size = group.broadcast(torch.tensor([len(data)], device=self._device), source)
        buffer = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(int(size), dtype=torch.uint8)
        )
        buffer = group.broadcast(buffer.to(self._device), source)
        if self._world.answers:
            return done
        received: StepDone = Codec(StepDone).decode(split_frames(buffer.cpu().numpy().tobytes()))
        return received


def meeting_point(rank: int, size: int, timeout: float) -> str:
    """Where ranks meet. torchrun's own store has its port: rank 0 chooses another and leaves a note there."""
    host, port = environment.MASTER_ADDR.get(), int(environment.MASTER_PORT.get())
    if size == 1 or not environment.TORCHELASTIC_USE_AGENT_STORE.get():
        return f"tcp://{host}:{port}"
    notes = dist.TCPStore(host, port, None, False, timeout=timedelta(seconds=timeout))
    if rank == 0:
        with socket.socket() as free:
            free.bind((host, 0))
            notes.set(KEY, f"tcp://{host}:{free.getsockname()[1]}")
    address = notes.get(KEY).decode()
    environment.TORCHELASTIC_USE_AGENT_STORE.set("False")  # or torch would take the other port for the launcher's too
    return str(address)
