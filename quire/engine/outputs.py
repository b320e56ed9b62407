"""Outputs for users; fields as in vLLM."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quire.engine.logprobs import Logprob, PromptLogprobs, SampleLogprobs, joined
from quire.messages.requests import ErrorKind

if TYPE_CHECKING:
    import numpy as np

__all__ = ["CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput"]


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    routed_experts: None = None  # this and the other fields of type None: of features to come
    finish_reason: str | None = None  # "stop", "length", "abort", "error", "repetition"
    stop_reason: int | str | None = None  # the stop string, or the stop token if not an EOS
    lora_request: None = None
    sampling_mask: None = None
    spec_decode_metrics: None = None
    weight_versions: None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Wall-clock times, derived from the monotonic clock, so that differences are right even if the wall clock was
    set."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None  # known at the end
    finished_time: float | None = None
    num_generation_tokens: int = 0  # of all completions, known at the end
    num_preemptions: int = 0  # of all completions

    @property
    def queued_ts(self) -> float:
        """This and what follows: vLLM's names."""
        return self.arrival_time

    @property
    def scheduled_ts(self) -> float:
        return self.first_scheduled_time or 0.0

    @property
    def first_token_ts(self) -> float:
        return self.first_token_time or 0.0

    @property
    def last_token_ts(self) -> float:
        return self.last_token_time or 0.0

    @property
    def first_token_latency(self) -> float:
        return self.time_to_first_token or 0.0

    @property
    def is_corrupted(self) -> bool:
        """Such a request ends with an error."""
        return False

    @property
    def time_to_first_token(self) -> float | None:
        return _between(self.arrival_time, self.first_token_time)

    @property
    def time_in_queue(self) -> float | None:
        return _between(self.arrival_time, self.first_scheduled_time)

    @property
    def time_in_prefill(self) -> float | None:
        return _between(self.first_scheduled_time, self.first_token_time)

    @property
    def time_in_decode(self) -> float | None:
        return _between(self.first_token_time, self.last_token_time)

    @property
    def time_in_inference(self) -> float | None:
        return _between(self.first_scheduled_time, self.last_token_time)


def _between(start: float | None, end: float | None) -> float | None:
    # The conversion between clocks may round to a negative difference.
    return None if start is None or end is None else max(0.0, end - start)


@dataclass(slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None  # None for the first token
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    lora_request: None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    num_cached_tokens: int | None = None
    num_cache_creation_tokens: int | None = None
    prompt_token_id_logprobs: "np.ndarray | None" = None  # [positions, k], of prompt_logprob_token_ids
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    error: str | None = None  # the cause, where a finish_reason is "error"
    error_kind: ErrorKind | None = None  # decides what of it clients see

    def add(self, next_output: "RequestOutput", aggregate: bool) -> None:
        """Merge the next output of the same request into this one: its deltas, or what replaces them."""
        self.finished |= next_output.finished
        mine = {part.index: part for part in self.outputs}
        for part in next_output.outputs:
            before = mine.get(part.index)
            if before is not None and aggregate:
                logprobs = joined(before.logprobs, part.logprobs) if part.logprobs else before.logprobs
                text, tokens = before.text + part.text, before.token_ids + part.token_ids
                part = replace(part, text=text, token_ids=tokens, logprobs=logprobs)
            mine[part.index] = part
        self.outputs = list(mine.values())
