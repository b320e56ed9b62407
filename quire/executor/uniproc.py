"""One worker in this process."""

import functools
import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from quire.config import EngineConfig
from quire.executor.base import PendingOutput, WorkerMethod
from quire.messages.features import FeatureSupport
from quire.messages.kv_cache import KVCacheConfig, KVCacheSpec
from quire.messages.lora import AdapterNews, LoRARequest
from quire.messages.plan import GrammarMask, ModelRunnerOutput, SchedulerOutput
from quire.platforms import platform_class
from quire.worker.memory import free_unused
from quire.worker.worker import Worker

Tasks = queue.SimpleQueue[Callable[[], None] | None]


class UniProcExecutor:
    """On a CPU with asynchronous scheduling the worker lives on a thread of its own, so that the core plans while the
    model computes. On a GPU, calls run in place: they only enqueue, and handing them to a thread would cost more.

    That thread runs every tensor operation, loading included: OpenMP keeps a pool of threads for each thread that ever
    computed, and with more threads than cores it waits by sleeping instead of spinning, which made steps 1.4 times
    longer.
    """

    def __init__(
        self, config: EngineConfig, make_worker: Callable[[EngineConfig], Any] = Worker, in_place: bool = False
    ) -> None:
        """`in_place`: never on a thread of its own, and what a user's code raises never ends the caller."""
        self._in_place = in_place
        self._error: Exception | None = None  # of the forward pass, until sampling reports it
        self._tasks: Tasks = queue.SimpleQueue()
        self._stop: Callable[[], object] | None = None
        self._platform = platform_class(config.device.device)
        self.worker: Any = None
        if config.scheduler.depth > 0 and not self._platform.launches_async and not in_place:
            thread = threading.Thread(target=_run, args=(self._tasks,), name="quire-worker", daemon=True)
            thread.start()
            # Even without a call of shutdown(): a thread inside torch while the interpreter exits aborts the process.
            self._stop = weakref.finalize(self, _stop, self._tasks, thread)
        try:
            self.worker = self._submit(lambda: make_worker(config)).result()
        except BaseException:
            self.shutdown()
            raise

    def on_failure(self, notify: Callable[[Exception], None]) -> None:
        """The worker ends with this process."""

    def kv_cache_specs(self) -> dict[int, KVCacheSpec]:
        return self.worker.kv_cache_specs()

    def kv_cache_memory(self) -> int:
        return self.worker.kv_cache_memory()

    def initialize_kv_cache(self, config: KVCacheConfig, max_model_len: int, on_transfer: Callable[[], None]) -> None:
        self._submit(lambda: self.worker.initialize_kv_cache(config, max_model_len, on_transfer)).result()

    def execute_model(self, plan: SchedulerOutput) -> None:
        self._submit(lambda: self._execute(plan))

    def sample_tokens(self, grammar: GrammarMask | None = None) -> PendingOutput:
        if self._stop is not None:
            return self._submit(lambda: self._sample(grammar).result())
        try:
            return self._sample(grammar)
        except BaseException as error:
            if self._interrupts(error):
                raise
            failed: Future[ModelRunnerOutput] = Future()
            failed.set_exception(_failure(error))
            return failed

    # Neither loading nor its news waits for steps; the rest is in their order.
    def load_adapter(self, request: LoRARequest) -> None:
        self.worker.load_adapter(request)

    def drop_adapter(self, lora_id: int) -> None:
        self.worker.drop_adapter(lora_id)

    def adapter_news(self) -> list[AdapterNews]:
        news: list[AdapterNews] = self.worker.adapter_news()
        return news

    def place_adapter(self, lora_id: int, slot: int) -> None:
        self._submit(lambda: self.worker.place_adapter(lora_id, slot))

    def use_adapter(self, lora_id: int, slot: int) -> None:
        self._submit(lambda: self.worker.use_adapter(lora_id, slot))

    def feature_support(self) -> FeatureSupport | None:
        support: FeatureSupport | None = self.worker.feature_support()
        return support

    def collective_rpc(self, method: WorkerMethod, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        worker = self.worker
        call = getattr(worker, method, None) if isinstance(method, str) else functools.partial(method, worker)
        if call is None:
            raise ValueError(f"workers have no method {method}")
        return [self._submit(lambda: call(*args, **kwargs)).result()]

    def describe(self) -> str:
        return self._submit(lambda: self.worker.describe()).result()

    def shutdown(self) -> None:
        if self._stop is not None:
            self._stop()
        if self.worker is not None and self._platform.has_own_memory:
            self.worker = None
            free_unused()  # the next engine of this process measures what is free

    def _interrupts(self, error: BaseException) -> bool:
        return self._stop is None and not self._in_place and isinstance(error, (KeyboardInterrupt, SystemExit))

    def _submit(self, call: Callable[[], Any]) -> "Future[Any]":
        future: Future[Any] = Future()

        def task() -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                if self._interrupts(error):
                    raise  # the caller's own thread was interrupted
                future.set_exception(_failure(error))

        if self._stop is None:
            task()
        else:
            self._tasks.put(task)
        return future

    def _execute(self, plan: SchedulerOutput) -> None:
        try:
            self.worker.execute_model(plan)
        except BaseException as error:
            if self._interrupts(error):
                raise
            self._error = _failure(error)

    def _sample(self, grammar: GrammarMask | None) -> PendingOutput:
        error, self._error = self._error, None
        if error is not None:
            raise error
        pending: PendingOutput = self.worker.sample_tokens(grammar)
        return pending


def _failure(error: BaseException) -> Exception:
    """The error of a step as an Exception: a panic in a Rust library, or SystemExit from a user's code, fails the step
    and not the thread."""
    if isinstance(error, Exception):
        return error
    failure = RuntimeError(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _run(tasks: Tasks) -> None:
    """References only the queue, so that an unreferenced executor can be collected."""
    while (task := tasks.get()) is not None:
        task()
        del task


def _stop(tasks: Tasks, thread: threading.Thread) -> None:
    tasks.put(None)
    if thread is not threading.current_thread():
        thread.join()
