"""A worked example of an executor: ranks that are threads of this process, with collectives that meet at a barrier. One
file, and its name: --distributed-executor-backend tests.executor.threads:ThreadsExecutor."""

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from quire.config import EngineConfig
from quire.distributed.group import Group
from quire.distributed.layout import WorldLayout
from quire.distributed.world import World
from quire.executor.adapter_news import NewsOfAll
from quire.executor.base import WorkerMethod
from quire.executor.uniproc import UniProcExecutor
from quire.layers.parallel import TensorParallel
from quire.messages.features import FeatureSupport
from quire.messages.kv_cache import KVCacheConfig, KVCacheSpec
from quire.messages.lora import AdapterNews, LoRARequest
from quire.messages.plan import GrammarMask, ModelRunnerOutput, SchedulerOutput
from quire.worker.worker import Worker


class Meeting:
    def __init__(self, size: int) -> None:
        self.tensors: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=300)

    def exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor."""
        self.tensors[rank] = x
        self.barrier.wait()
        found = list(self.tensors)
        self.barrier.wait()  # until all have read
        return found


class ThreadGroup(Group):
    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(range(len(meeting.tensors)), rank)
        self.meeting = meeting

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.meeting.exchange(self.rank, x)).sum(0)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.meeting.exchange(self.rank, x), dim=-1)

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        found = self.meeting.exchange(self.rank, x.clone())[source]
        assert found.shape == x.shape and found.dtype == x.dtype
        return x.copy_(found)


def on_every_rank(function: Callable[[TensorParallel], Any], size: int = 2) -> list[Any]:
    """Call it at the same time as each rank of so many."""
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as pool:
        parts = [TensorParallel(rank, size, ThreadGroup(rank, meeting)) for rank in range(size)]
        return list(pool.map(function, parts))


class ResultOfAll:
    """Every rank has taken over the tokens; one answers."""

    def __init__(self, results: list[Any]) -> None:
        self.results = results

    def result(self) -> ModelRunnerOutput:
        answer, *others = self.results
        found = answer.result()
        for other in others:
            other.result()  # raises its errors
        return found


class ThreadsExecutor:
    """Every plan goes to every rank, each of which has a thread whether or not scheduling is asynchronous."""

    size = 2

    def __init__(self, config: EngineConfig) -> None:
        meeting = Meeting(self.size)
        # As a CPU's with asynchronous scheduling has.
        scheduler, device = config.scheduler, config.device
        threaded = dataclasses.replace(
            config,
            scheduler=dataclasses.replace(scheduler, async_scheduling=True),
            device=dataclasses.replace(device, device="cpu"),
        )

        def start(rank: int) -> UniProcExecutor:
            group = ThreadGroup(rank, meeting)
            world = World(rank, WorldLayout(tensor=self.size), tensor=group, model=group)
            return UniProcExecutor(threaded, lambda _: Worker(config, world))

        self.ranks = [start(rank) for rank in range(self.size)]
        self.news = NewsOfAll()

    def on_failure(self, notify: Callable[[Exception], None]) -> None: ...

    def kv_cache_specs(self) -> dict[int, KVCacheSpec]:
        return self.ranks[0].kv_cache_specs()

    def kv_cache_memory(self) -> int:
        return min(rank.kv_cache_memory() for rank in self.ranks)

    def initialize_kv_cache(self, config: KVCacheConfig, max_model_len: int, on_transfer: Callable[[], None]) -> None:
        with ThreadPoolExecutor(self.size) as pool:  # at the same time, in case steps are run
            list(pool.map(lambda rank: rank.initialize_kv_cache(config, max_model_len, on_transfer), self.ranks))

    def execute_model(self, plan: SchedulerOutput) -> None:
        for rank in self.ranks:
            rank.execute_model(plan)

    def sample_tokens(self, grammar: GrammarMask | None = None) -> ResultOfAll:
        return ResultOfAll([rank.sample_tokens(grammar) for rank in self.ranks])

    def load_adapter(self, request: LoRARequest) -> None:
        for rank in self.ranks:
            rank.load_adapter(request)

    def place_adapter(self, lora_id: int, slot: int) -> None:
        for rank in self.ranks:
            rank.place_adapter(lora_id, slot)

    def use_adapter(self, lora_id: int, slot: int) -> None:
        for rank in self.ranks:
            rank.use_adapter(lora_id, slot)

    def drop_adapter(self, lora_id: int) -> None:
        for rank in self.ranks:
            rank.drop_adapter(lora_id)

    def adapter_news(self) -> list[AdapterNews]:
        return self.news.add([rank.adapter_news() for rank in self.ranks])

    def feature_support(self) -> FeatureSupport | None:
        return self.ranks[0].feature_support()

    def collective_rpc(self, method: WorkerMethod, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        with ThreadPoolExecutor(self.size) as pool:
            return [one for (one,) in pool.map(lambda rank: rank.collective_rpc(method, args, kwargs), self.ranks)]

    def describe(self) -> str:
        return self.ranks[0].describe()

    def shutdown(self) -> None:
        for rank in self.ranks:
            rank.shutdown()


class ThreeThreads(ThreadsExecutor):
    size = 3


class FourThreads(ThreadsExecutor):
    size = 4
