"""One worker in this process."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from quire.config import EngineConfig
from quire.messages.kv_cache import KVCacheConfig, KVCacheSpec
from quire.messages.plan import ModelRunnerOutput, SchedulerOutput
from quire.worker.worker import Worker


class UniProcExecutor:
    """With asynchronous scheduling the worker has a thread of its own, so that the core plans while the model
    computes; without, calls run in place."""

    def __init__(self, config: EngineConfig, worker: Any = None) -> None:
        self.worker = worker or Worker(config)
        self._error: Exception | None = None  # of the forward pass, until sampling reports it
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if config.scheduler.depth > 0:
            self._thread = threading.Thread(target=self._run, name="quire-worker", daemon=True)
            self._thread.start()

    def kv_cache_specs(self) -> dict[int, KVCacheSpec]:
        return self.worker.kv_cache_specs()

    def kv_cache_memory(self) -> int:
        return self.worker.kv_cache_memory()

    def initialize_kv_cache(self, config: KVCacheConfig, max_model_len: int) -> None:
        self.worker.initialize_kv_cache(config, max_model_len)

    def execute_model(self, plan: SchedulerOutput) -> None:
        self._submit(partial(self._execute, plan))

    def sample_tokens(self) -> Future[ModelRunnerOutput]:
        future: Future[ModelRunnerOutput] = Future()
        self._submit(partial(self._sample, future))
        return future

    def describe(self) -> str:
        return self.worker.describe()

    def shutdown(self) -> None:
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
            self._thread = None

    def _submit(self, task: Callable[[], None]) -> None:
        if self._thread is None:
            task()
        else:
            self._tasks.put(task)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def _execute(self, plan: SchedulerOutput) -> None:
        try:
            self.worker.execute_model(plan)
        except Exception as error:
            self._error = error

    def _sample(self, future: "Future[ModelRunnerOutput]") -> None:
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            future.set_result(self.worker.sample_tokens())
        except Exception as error:
            future.set_exception(error)
