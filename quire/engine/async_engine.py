"""The engine's interface to the server, implemented by `AsyncLLM` and by a stub that measures the front end alone."""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from quire.config import EngineConfig
from quire.engine.input_processor import ParsedPrompt, Prompt
from quire.engine.outputs import RequestOutput
from quire.messages.pooling_params import PoolingParams
from quire.messages.requests import SchedulerStats
from quire.messages.sampling_params import SamplingParams
from quire.metrics.kinds import Metric
from quire.pooling.outputs import PoolingOutput, PoolingRequestOutput
from quire.tokenizer.tokenizer import Tokenizer


class EngineDeadError(RuntimeError):
    """The engine process has exited; nothing can be generated any more."""


class EngineCallError(RuntimeError):
    """The engine refused a call, or failed in it."""


class EngineStalledError(RuntimeError):
    """The engine process is alive but unresponsive: stopped, swapped out, or stuck in a step. It may recover."""


class AsyncEngine(Protocol):
    config: EngineConfig
    model_name: str
    max_model_len: int
    max_num_seqs: int  # that can run at a time; others wait
    tokenizer: Tokenizer | None
    stats: SchedulerStats

    def generate(
        self,
        prompt: Prompt | ParsedPrompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs as they are generated, of the kind `sampling_params.output_kind`; deltas are merged while the
        consumer is slow. Invalid input raises ValueError from the first `__anext__`; closing the iterator early aborts
        the request."""
        ...

    async def encode_many(
        self,
        prompts: Sequence[ParsedPrompt],
        pooling_params: PoolingParams,
        request_ids: Sequence[str],
        *,
        priority: int = 0,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Pool all prompts of a request. Invalid input raises ValueError before any runs; cancelling aborts all."""
        ...

    async def abort(self, request_ids: list[str]) -> None: ...

    async def reset_prefix_cache(self) -> bool: ...

    async def get_state(self) -> dict[str, dict[str, int]]:
        """Current counts of requests, blocks and others, in the front end ("front_end") and the core ("core")."""
        ...

    async def get_kv_event_sources(self) -> dict[str, dict[str, Any]]:
        """By data-parallel rank, where events of the KV cache are published; empty if they are not."""
        ...

    async def get_view(self, since: int) -> dict[str, Any]:
        """What the core does right now, and its steps after step `since`: see `core/view.py`."""
        ...

    async def check_health(self) -> None:
        """Raises EngineDeadError, with the cause, if the engine has exited; EngineStalledError if it is stalled."""
        ...

    def get_num_unfinished_requests(self) -> int: ...

    def get_num_unfinished_sequences(self) -> int:
        """Running and waiting completions: a request has `n`."""
        ...

    def get_metrics(self) -> list[Metric]: ...

    def shutdown(self) -> None: ...
