"""What the core asks of those who run the model."""

from typing import Protocol

from quire.messages.kv_cache import KVCacheConfig, KVCacheSpec
from quire.messages.plan import GrammarMask, ModelRunnerOutput, SchedulerOutput


class StepResult(Protocol):
    def result(self) -> ModelRunnerOutput:
        """Waits until the device is done; an error of the step is raised here."""
        ...


class Executor(Protocol):
    """A step is two calls: the forward pass, then sampling. Both return before the device is done."""

    def kv_cache_specs(self) -> dict[int, KVCacheSpec]:
        """Per layer that keeps KV."""
        ...

    def kv_cache_memory(self) -> int:
        """Bytes that the KV cache may take, measured."""
        ...

    def initialize_kv_cache(self, config: KVCacheConfig, max_model_len: int) -> None: ...

    def execute_model(self, plan: SchedulerOutput) -> None: ...

    def sample_tokens(self, grammar: GrammarMask | None = None) -> StepResult:
        """Sample for the plan executed last, within what grammars allow. An error of either call is the result's."""
        ...

    def describe(self) -> str:
        """Platform and kernels, for the start-up line."""
        ...

    def shutdown(self) -> None: ...
