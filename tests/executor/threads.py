"""A worked example of an executor: two ranks, each a thread of this process, with collectives that meet at a barrier.
One file, and its name: --distributed-executor-backend tests.executor.threads:ThreadsExecutor."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from quire.config import EngineConfig
from quire.distributed.group import Group
from quire.distributed.layout import WorldLayout
from quire.distributed.world import World
from quire.executor.base import WorkerMethod
from quire.executor.uniproc import UniProcExecutor
from quire.layers.parallel import TensorParallel
from quire.lora.adapters import AdapterWeights
from quire.messages.features import FeatureSupport
from quire.messages.kv_cache import KVCacheConfig, KVCacheSpec
from quire.messages.plan import GrammarMask, ModelRunnerOutput, SchedulerOutput
from quire.worker.worker import Worker

WORLD = 2


class Meeting:
    def __init__(self, size: int = WORLD) -> None:
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
        super().__init__(range(WORLD), rank)
        self.meeting = meeting

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.meeting.exchange(self.rank, x)).sum(0)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.meeting.exchange(self.rank, x), dim=-1)


def on_every_rank(function: Callable[[TensorParallel], Any]) -> list[Any]:
    """Call it at the same time as rank 0 and rank 1 of two."""
    meeting = Meeting()
    with ThreadPoolExecutor(WORLD) as pool:
        parts = [TensorParallel(rank, WORLD, ThreadGroup(rank, meeting)) for rank in range(WORLD)]
        return list(pool.map(function, parts))


class ResultOfAll:
    """Every rank has sampled; one answers."""

    def __init__(self, results: list[Any]) -> None:
        self.results = results

    def result(self) -> ModelRunnerOutput:
        first, *others = [result.result() for result in self.results]
        kept = np.arange(first.token_ids.shape[1]) < first.num_sampled[:, None]
        for other in others:
            assert (other.num_sampled == first.num_sampled).all()
            assert (other.token_ids == first.token_ids)[kept].all()
        return first


class ThreadsExecutor:
    """Every plan goes to every rank. Asynchronous scheduling is needed: it gives each worker its thread."""

    def __init__(self, config: EngineConfig) -> None:
        meeting = Meeting()

        def start(rank: int) -> UniProcExecutor:
            group = ThreadGroup(rank, meeting)
            world = World(rank, WorldLayout(tensor=WORLD), tensor=group, model=group)
            return UniProcExecutor(config, lambda config: Worker(config, world))

        self.ranks = [start(rank) for rank in range(WORLD)]

    def on_failure(self, notify: Callable[[Exception], None]) -> None: ...

    def kv_cache_specs(self) -> dict[int, KVCacheSpec]:
        return self.ranks[0].kv_cache_specs()

    def kv_cache_memory(self) -> int:
        return min(rank.kv_cache_memory() for rank in self.ranks)

    def initialize_kv_cache(self, config: KVCacheConfig, max_model_len: int, on_transfer: Callable[[], None]) -> None:
        with ThreadPoolExecutor(WORLD) as pool:  # at the same time, in case steps are run
            list(pool.map(lambda rank: rank.initialize_kv_cache(config, max_model_len, on_transfer), self.ranks))

    def execute_model(self, plan: SchedulerOutput) -> None:
        for rank in self.ranks:
            rank.execute_model(plan)

    def sample_tokens(self, grammar: GrammarMask | None = None) -> ResultOfAll:
        return ResultOfAll([rank.sample_tokens(grammar) for rank in self.ranks])

    def set_adapter(self, lora_id: int, weights: AdapterWeights) -> None:
        for rank in self.ranks:
            rank.set_adapter(lora_id, weights)

    def remove_adapter(self, lora_id: int) -> None:
        for rank in self.ranks:
            rank.remove_adapter(lora_id)

    def feature_support(self) -> FeatureSupport | None:
        return self.ranks[0].feature_support()

    def collective_rpc(self, method: WorkerMethod, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        with ThreadPoolExecutor(WORLD) as pool:
            return [one for (one,) in pool.map(lambda rank: rank.collective_rpc(method, args, kwargs), self.ranks)]

    def describe(self) -> str:
        return self.ranks[0].describe()

    def shutdown(self) -> None:
        for rank in self.ranks:
            rank.shutdown()
