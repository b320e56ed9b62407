"""Outputs for users; fields as in vLLM."""

from dataclasses import dataclass

from quire.messages.requests import ErrorKind


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # "stop", "length", "abort", "error", "repetition"
    stop_reason: int | str | None = None  # the stop string, or the stop token if not an EOS

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
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # None for the first token
    metrics: RequestMetrics | None = None
    error: str | None = None  # the cause, where a finish_reason is "error"
    error_kind: ErrorKind | None = None  # decides what of it clients see
