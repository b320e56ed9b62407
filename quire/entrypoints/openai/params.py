"""From a request's fields to SamplingParams, with OpenAI's defaults and the server's limits."""

from collections.abc import Mapping
from typing import Any

from quire.config import ModelConfig
from quire.config.server import ServerConfig
from quire.config.shown import shown
from quire.engine.input_processor import MAX_PRIORITY
from quire.entrypoints.http.errors import bad_request, not_available
from quire.entrypoints.openai.errors import refused_value
from quire.entrypoints.openai.protocol import ChatRequest, CompletionRequest, GenerationRequest
from quire.entrypoints.openai.structured import structured_outputs
from quire.messages.sampling_params import ALL_LOGPROBS, RequestOutputKind, SamplingParams

# Fields with the same name and meaning in requests and SamplingParams.
SHARED_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "stop",
    "logit_bias",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "prompt_logprobs",
    "repetition_detection",
    "logprob_token_ids",
    "stream_interval",
    "thinking_token_budget",
    "watermarking",
    "routed_experts_prompt_start",
)
DEFAULT_MAX_TOKENS = 16  # OpenAI's for completions
MAX_LOGPROB_ENTRIES = 1 << 20


class ParamsBuilder:
    def __init__(self, config: ServerConfig, max_model_len: int, model: ModelConfig) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.vocab_size = model.vocab_size
        # Whoever allows a whole vocabulary of logprobs expects larger responses.
        everything = model.max_logprobs == ALL_LOGPROBS or 0 < model.vocab_size <= model.max_logprobs
        most = MAX_LOGPROB_ENTRIES * (16 if everything else 1)
        self.max_logprob_entries = most if config.max_logprob_entries is None else config.max_logprob_entries
        self.defaults = {name: value for name, value in model.default_sampling.items() if name != "max_tokens"}
        self.max_tokens: int | None = model.default_sampling.get("max_tokens")  # None: generation_config.json sets none

    def for_completion(self, request: CompletionRequest) -> SamplingParams:
        if request.suffix:
            raise not_available("suffix", "inserting text before a suffix")
        if request.best_of is not None and request.best_of != (request.n or 1):
            raise not_available("best_of", "choosing among more completions than n")
        given = self._given(request)
        limit = self.completion_max_tokens if request.max_tokens is None else request.max_tokens
        if request.echo and limit == 0:
            limit = 1  # prompt scoring: the generated token is dropped from the response
        given["max_tokens"] = limit
        if request.logprobs is not None:
            if request.logprobs < -1:
                raise bad_request(f"logprobs is {request.logprobs}; it must be 0 or more", "logprobs")
            given["logprobs"] = request.logprobs
            if request.echo:
                given.setdefault("prompt_logprobs", request.logprobs)
        return self._build(request, given)

    def for_chat(self, request: ChatRequest) -> SamplingParams:
        _refuse_in_chat(request)
        given = self._given(request)
        given["max_tokens"] = request.max_completion_tokens
        if request.max_completion_tokens is None:
            given["max_tokens"] = self.max_tokens if request.max_tokens is None else request.max_tokens
        if request.logprobs:
            top = request.top_logprobs or 0
            if top < ALL_LOGPROBS:
                raise bad_request(f"top_logprobs is {top}; it must be 0 or more, or -1 for all", "top_logprobs")
            given["logprobs"] = top
        elif request.top_logprobs:
            raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
        return self._build(request, given)

    @property
    def completion_max_tokens(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def _given(self, request: GenerationRequest) -> dict[str, Any]:
        given = {name: getattr(request, name) for name in SHARED_FIELDS}
        given = self.defaults | {name: value for name, value in given.items() if value is not None}
        if request.return_mm_kwargs:
            raise not_available("return_mm_kwargs", "inputs of images, audio or video")
        _check_truncation(request)
        if isinstance(given.get("stop"), str):
            given["stop"] = [given["stop"]]
        if request.vllm_xargs is not None:
            given["extra_args"] = request.vllm_xargs
        if (form := structured_outputs(request)) is not None:
            given["structured_outputs"] = form
        self.check_limits(given.get("n", 1), len(given.get("stop", ())))
        allowed = len(given.get("allowed_token_ids", ()))
        if self.vocab_size and allowed > self.vocab_size:
            message = f"allowed_token_ids has {allowed} entries; the model's vocabulary has {self.vocab_size}"
            raise bad_request(message, "allowed_token_ids")
        if self.vocab_size and given.get("top_k", 0) > self.vocab_size:
            given["top_k"] = 0  # no restriction
        if request.stream_options is not None and not request.stream:
            raise bad_request("stream_options needs stream to be true", "stream_options")
        if request.priority is not None and abs(request.priority) > MAX_PRIORITY:
            bounds = f"it must be between -{MAX_PRIORITY} and {MAX_PRIORITY}"
            raise bad_request(f"priority is {request.priority}; {bounds}", "priority")
        return given

    def check_limits(self, n: int, stops: int) -> None:
        if stops > self.config.max_stop:
            raise bad_request(
                f"stop has {stops} entries; at most {self.config.max_stop} are allowed (--max-stop)", "stop"
            )
        if n > self.config.max_n:
            raise bad_request(f"n is {n}; at most {self.config.max_n} choices are allowed (--max-n)", "n")

    def _build(self, request: GenerationRequest, given: dict[str, Any]) -> SamplingParams:
        check_named_tokens(given)
        if given["max_tokens"] is not None:
            # Generation stops at max_model_len with finish_reason "length" anyway.
            given["max_tokens"] = min(given["max_tokens"], self.max_model_len)
        kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
        try:
            return SamplingParams(**given, output_kind=kind)
        except ValueError as error:
            raise refused_value(error, request.__struct_fields__) from None


def check_named_tokens(given: Mapping[str, Any]) -> None:
    """Without logprobs the response has no place for those of the named tokens."""
    if given.get("logprob_token_ids") and given.get("logprobs") is None:
        raise bad_request("logprob_token_ids needs logprobs, which the response holds them in", "logprob_token_ids")


def _check_truncation(request: GenerationRequest) -> None:
    side = request.truncation_side
    if side not in (None, "left", "right"):
        raise bad_request(f"truncation_side is {shown(side)}; allowed: left, right", "truncation_side")


def truncated_right(request: GenerationRequest, ids: list[int], longest: int) -> list[int]:
    """The prompt's first tokens, where the request cuts its end; the engine itself only cuts the beginning."""
    keep = request.truncate_prompt_tokens
    if request.truncation_side != "right" or keep is None:
        return ids
    return ids[: longest if keep < 0 else keep]


def _refuse_in_chat(request: ChatRequest) -> None:
    if request.functions:
        raise bad_request("functions is deprecated; use tools", "functions")
    if request.function_call not in (None, "none", "auto"):
        raise bad_request("function_call is deprecated; use tool_choice", "function_call")
    if request.audio is not None or (request.modalities or ["text"]) != ["text"]:
        raise not_available("audio" if request.audio is not None else "modalities", "output other than text")
