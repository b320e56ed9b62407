"""Pipelines of threads: every rank of a world of stages, each a thread of this process; what goes from one stage to
another is queued. Their names are --distributed-executor-backend tests.executor.stages:TwoStages and so on."""

import dataclasses
import queue
import threading
from collections import defaultdict
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
from quire.executor.stages import memory_of_all, specs_of_all
from quire.executor.uniproc import UniProcExecutor
from quire.messages.kv_cache import KVCacheConfig, KVCacheSpec
from quire.messages.lora import AdapterNews, LoRARequest
from quire.messages.plan import GrammarMask, ModelRunnerOutput, SchedulerOutput
from quire.worker.worker import Worker

Event = tuple[int, str, int]  # stage, what happened, step


class Exchange:
    """Between the ranks of a group: barriers for collectives, a queue for each pair."""

    def __init__(self, size: int) -> None:
        self.tensors: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=300)
        self.queues: dict[tuple[int, int], queue.SimpleQueue[torch.Tensor]] = defaultdict(queue.SimpleQueue)


class ThreadGroup(Group):
    def __init__(self, ranks: Sequence[int], rank: int, exchange: Exchange) -> None:
        super().__init__(ranks, rank)
        self.exchange = exchange

    def everyones(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.exchange.tensors[self.rank] = x
        self.exchange.barrier.wait()
        found = list(self.exchange.tensors)
        self.exchange.barrier.wait()  # until all have read
        return found

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.size == 1 else torch.stack(self.everyones(x)).sum(0)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.size == 1 else torch.cat(self.everyones(x), dim=-1)

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        return x if self.size == 1 else x.copy_(self.everyones(x.clone())[source])

    def send(self, x: torch.Tensor, to: int) -> None:
        self.exchange.queues[self.rank, to].put(x)

    def receive(self, x: torch.Tensor, source: int) -> torch.Tensor:
        found = self.exchange.queues[source, self.rank].get(timeout=300)
        assert found.shape == x.shape and found.dtype == x.dtype
        return x.copy_(found)


class Worlds:
    """The place of every rank, with groups that its threads share."""

    def __init__(self, layout: WorldLayout) -> None:
        self.layout = layout
        self.exchanges: dict[tuple[str, tuple[int, ...]], Exchange] = {}

    def world(self, rank: int) -> World:
        layout = self.layout
        return World(
            rank,
            layout,
            tensor=self._group("tensor", layout.tensor_ranks(rank), rank),
            stages=self._group("stages", layout.stage_ranks(rank), rank),
            model=self._group("model", layout.model_ranks(rank), rank),
            tokens=self._group("tokens", layout.stage_ranks(rank), rank),
        )

    def _group(self, kind: str, ranks: tuple[int, ...], rank: int) -> ThreadGroup:
        return ThreadGroup(ranks, rank, self.exchanges.setdefault((kind, ranks), Exchange(len(ranks))))


class Log:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.changed = threading.Condition()

    def add(self, event: Event) -> None:
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def wait_for(self, event: Event) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: event in self.events, timeout=60), f"{event} did not happen"


class TracedWorker(Worker):
    """Notes when it begins and ends the forward pass of a step."""

    def __init__(self, config: EngineConfig, world: World, log: Log) -> None:
        super().__init__(config, world)
        self.log = log

    def execute_model(self, plan: SchedulerOutput) -> None:
        self.log.add((self.world.stage, "begins", plan.step))
        super().execute_model(plan)
        self.log.add((self.world.stage, "ends", plan.step))


class ResultOfLast:
    """All ranks have run the step; the first of the last stage answers."""

    def __init__(self, results: list[Any], answers: int) -> None:
        self.results, self.answers = results, answers

    def result(self) -> ModelRunnerOutput:
        return [result.result() for result in self.results][self.answers]


class TwoStages:
    layout = WorldLayout(stages=2)

    def __init__(self, config: EngineConfig) -> None:
        config.parallel.pipeline_parallel_size = self.layout.stages
        worlds = Worlds(self.layout)
        self.log = Log()
        self.plans: list[SchedulerOutput] = []
        # Each rank has a thread, whether or not scheduling is asynchronous.
        threaded = dataclasses.replace(config, scheduler=dataclasses.replace(config.scheduler, async_scheduling=True))
        places = [worlds.world(rank) for rank in range(self.layout.size)]
        self.answers = [world.answers for world in places].index(True)

        def start(world: World) -> UniProcExecutor:
            return UniProcExecutor(threaded, lambda _: TracedWorker(config, world, self.log))

        self.ranks = [start(world) for world in places]
        self.news = NewsOfAll()

    def kv_cache_specs(self) -> dict[int, KVCacheSpec]:
        return specs_of_all([rank.kv_cache_specs() for rank in self.ranks])

    def kv_cache_memory(self) -> int:
        return memory_of_all(
            [rank.kv_cache_memory() for rank in self.ranks], [rank.kv_cache_specs() for rank in self.ranks]
        )

    def initialize_kv_cache(self, config: KVCacheConfig, max_model_len: int, on_transfer: Callable[[], None]) -> None:
        # At the same time where they share layers, for steps may be run; a GPU's graphs are captured one by one.
        with ThreadPoolExecutor(len(self.ranks) if self.layout.tensor > 1 else 1) as pool:
            list(pool.map(lambda rank: rank.initialize_kv_cache(config, max_model_len, on_transfer), self.ranks))

    def execute_model(self, plan: SchedulerOutput) -> None:
        self.plans.append(plan)
        for rank in self.ranks:
            rank.execute_model(plan)

    def sample_tokens(self, grammar: GrammarMask | None = None) -> ResultOfLast:
        return ResultOfLast([rank.sample_tokens(grammar) for rank in self.ranks], self.answers)

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

    def feature_support(self) -> None:
        return self.ranks[0].feature_support()

    def collective_rpc(self, method: WorkerMethod, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return [one for (one,) in pool.map(lambda rank: rank.collective_rpc(method, args, kwargs), self.ranks)]

    def describe(self) -> str:
        return self.ranks[0].describe()

    def shutdown(self) -> None:
        for rank in self.ranks:
            rank.shutdown()


class FourStages(TwoStages):
    layout = WorldLayout(stages=4)


class TwoByTwo(TwoStages):
    layout = WorldLayout(tensor=2, stages=2)
