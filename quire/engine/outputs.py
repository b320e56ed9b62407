"""Outputs for users; fields as in vLLM."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quire.engine.logprobs import Logprob, PromptLogprobs, SampleLogprobs, joined
from quire.messages.lora import LoRARequest
from quire.messages.requests import ErrorKind
from quire.metrics.request import RequestMetrics
from quire.metrics.spec_decode import SpecDecodeMetrics

if TYPE_CHECKING:
    import numpy as np

__all__ = ["CompletionOutput", "Logprob", "RequestOutput"]


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
    lora_request: LoRARequest | None = None
    sampling_mask: None = None
    spec_decode_metrics: SpecDecodeMetrics | None = None  # with per_request_spec_decode_metrics
    weight_versions: None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None  # None for the first token
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    lora_request: LoRARequest | None = None
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
