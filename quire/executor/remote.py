"""An executor whose workers are elsewhere: plans, samplings and calls go to them as messages."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from quire.executor.adapter_news import NewsOfAll
from quire.executor.base import PendingOutput, WorkerMethod
from quire.executor.stages import specs_of_all
from quire.executor.worker_messages import Execute, Sample
from quire.messages.features import FeatureSupport
from quire.messages.kv_cache import KVCacheSpec
from quire.messages.lora import AdapterNews, LoRARequest
from quire.messages.plan import GrammarMask, ModelRunnerOutput, SchedulerOutput
from quire.messages.protocol import Codec

NEWS_SECONDS = 0.005  # between questions for news of adapters


class RemoteExecutor:
    """What does not depend on how messages travel."""

    def __init__(self) -> None:
        self._encoder = Codec()
        self._step = 0  # the last that was sampled
        self._unsent: Exception | None = None  # why the last plan could not be encoded
        self._news = NewsOfAll()
        self._news_due = 0.0

    def _write(self, frames: Sequence[Any]) -> None:
        """Send a message to all workers."""
        raise NotImplementedError

    def _pending(self) -> PendingOutput:
        """The output of the step that was sampled last."""
        raise NotImplementedError

    def collective_rpc(self, method: WorkerMethod, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        raise NotImplementedError

    def kv_cache_specs(self) -> dict[int, KVCacheSpec]:
        return specs_of_all(self._call("kv_cache_specs"))

    def execute_model(self, plan: SchedulerOutput) -> None:
        try:
            frames = self._encoder.encode(Execute(plan))
        except (TypeError, ValueError, OverflowError) as error:
            self._unsent = error
        else:
            self._write(frames)

    def sample_tokens(self, grammar: GrammarMask | None = None) -> PendingOutput:
        error, self._unsent = self._unsent, None
        if error is not None:
            unsent: Future[ModelRunnerOutput] = Future()
            unsent.set_exception(error)
            return unsent
        self._step += 1
        self._write(self._encoder.encode(Sample(self._step, grammar)))
        return self._pending()

    def load_adapter(self, request: LoRARequest) -> None:
        self._call("load_adapter", request)

    def place_adapter(self, lora_id: int, slot: int) -> None:
        self._call("place_adapter", lora_id, slot)

    def use_adapter(self, lora_id: int, slot: int) -> None:
        self._call("use_adapter", lora_id, slot)

    def drop_adapter(self, lora_id: int) -> None:
        self._call("drop_adapter", lora_id)

    def adapter_news(self) -> list[AdapterNews]:
        """Asked for at intervals: workers answer between two steps."""
        now = time.monotonic()
        if now < self._news_due:
            return []
        self._news_due = now + NEWS_SECONDS
        return self._news.add(self._call("adapter_news"))

    def feature_support(self) -> FeatureSupport | None:
        support: FeatureSupport | None = self._call("feature_support")[0]
        return support

    def _call(self, method: str, *args: Any) -> list[Any]:
        return self.collective_rpc(method, args, {})
