"""What a server needs of an engine. `AsyncLLM` is one; a stub for measuring the front end alone is another."""

from collections.abc import AsyncIterator
from typing import Protocol

from quire.config import EngineConfig
from quire.engine.input_processor import ParsedPrompt, Prompt
from quire.engine.metrics import Metric
from quire.engine.outputs import RequestOutput
from quire.messages.requests import SchedulerStats
from quire.messages.sampling_params import SamplingParams
from quire.tokenizer.tokenizer import Tokenizer


class EngineDeadError(RuntimeError):
    """The engine process has ended; nothing can be generated any more."""


class EngineStalledError(RuntimeError):
    """The engine process is there but does not answer: stopped, swapped out, or stuck in a step. It may recover."""


class AsyncEngine(Protocol):
    config: EngineConfig
    model_name: str
    max_model_len: int
    max_num_seqs: int  # that run at a time; others wait
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
        """Outputs as they come, of the kind that `sampling_params.output_kind` says; deltas that pile up while the
        consumer is slow are merged. Bad input is a ValueError from the first `__anext__`; leaving the iterator early
        aborts the request."""
        ...

    async def abort(self, request_ids: list[str]) -> None: ...

    async def reset_prefix_cache(self) -> bool: ...

    async def get_state(self) -> dict[str, dict[str, int]]:
        """What front end ("front_end") and core ("core") hold right now: requests, blocks."""
        ...

    async def check_health(self) -> None:
        """EngineDeadError, with the cause, if the engine has ended; EngineStalledError while it does not answer."""
        ...

    def get_num_unfinished_requests(self) -> int: ...

    def get_num_unfinished_sequences(self) -> int:
        """Completions that run or wait: a request has `n`."""
        ...

    def get_metrics(self) -> list[Metric]: ...

    def shutdown(self) -> None: ...
