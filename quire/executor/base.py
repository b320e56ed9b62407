"""The interface through which the core runs the model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from quire.messages.features import FeatureSupport
from quire.messages.kv_cache import KVCacheConfig, KVCacheSpec
from quire.messages.lora import AdapterNews, LoRARequest
from quire.messages.plan import GrammarMask, ModelRunnerOutput, SchedulerOutput

WorkerMethod = str | Callable[..., Any]  # its name, or a function that is called with the worker


class PendingOutput(Protocol):
    def result(self) -> ModelRunnerOutput:
        """Wait until the device is done; an error of the step is raised here."""
        ...


class Executor(Protocol):
    """A step is two calls: the forward pass, then sampling. Both return before the device is done."""

    def on_failure(self, notify: Callable[[Exception], None]) -> None:
        """`notify` is called, in any thread, when a worker has ended by itself, with what every later call raises."""
        ...

    def kv_cache_specs(self) -> dict[int, KVCacheSpec]:
        """By layer that has a KV cache."""
        ...

    def kv_cache_memory(self) -> int:
        """The measured budget of the KV cache, in bytes."""
        ...

    def initialize_kv_cache(self, config: KVCacheConfig, max_model_len: int, on_transfer: Callable[[], None]) -> None:
        """`on_transfer` is called, in any thread, when a KV connector has something to report."""
        ...

    def execute_model(self, plan: SchedulerOutput) -> None: ...

    def sample_tokens(self, grammar: GrammarMask | None = None) -> PendingOutput:
        """Sample for the plan executed last, under its grammar masks. The result raises an error of either call."""
        ...

    def load_adapter(self, request: LoRARequest) -> None:
        """Read it into host memory; `adapter_news` tells when that is done."""
        ...

    def place_adapter(self, lora_id: int, slot: int) -> None:
        """Copy it into a slot, after the plans submitted before; `adapter_news` tells when that is done."""
        ...

    def use_adapter(self, lora_id: int, slot: int) -> None:
        """Rows of plans submitted from now on may have it."""
        ...

    def drop_adapter(self, lora_id: int) -> None:
        """From host memory."""
        ...

    def adapter_news(self) -> list[AdapterNews]:
        """Since the last call, of what all workers have done. Does not wait for steps."""
        ...

    def feature_support(self) -> FeatureSupport | None:
        """What prompts may hold beside token ids; None: nothing."""
        ...

    def collective_rpc(self, method: WorkerMethod, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Call a method of every worker, or a function with the worker as its first argument: a result for each."""
        ...

    def describe(self) -> str:
        """Platform and kernels, for the start-up log."""
        ...

    def shutdown(self) -> None: ...
