"""Response schemas, for the OpenAPI document only: responses themselves are assembled from bytes.

A test validates real responses against them.
"""

from typing import Any

import msgspec


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None
    completion_tokens_details: CompletionTokensDetails | None


class DraftFigures(msgspec.Struct):
    """With --per-request-spec-decode-metrics."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    per_step_accepted: list[int] | None
    per_step_drafted: list[int] | None


class RequestTimes(msgspec.Struct):
    """With --enable-per-request-metrics."""

    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    queue_time_ms: float | None
    mean_itl_ms: float | None
    tokens_per_second: float | None
    speculative_decoding: DraftFigures | None


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: list[int] | None
    prompt_logprobs: list[dict[str, Any] | None] | None
    prompt_token_ids: list[int] | None
    routed_experts: None


class Response(msgspec.Struct):
    """What whole responses have in common; what Quire has no value for is null."""

    id: str
    object: str
    created: int
    model: str
    service_tier: None
    system_fingerprint: str | None
    usage: Usage
    kv_transfer_params: None
    ec_transfer_params: None
    metrics: RequestTimes | None


class Completion(Response):
    choices: list[CompletionChoice]


class ChatToken(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprobs(ChatToken):
    top_logprobs: list[ChatToken]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprobs]
    refusal: None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    type: str
    function: CalledFunction


class ChatMessage(msgspec.Struct):
    role: str
    content: str | None
    refusal: None
    annotations: None
    audio: None
    function_call: None
    reasoning: str | None
    reasoning_content: str | msgspec.UnsetType | None = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: list[int] | None
    routed_experts: None


class ChatCompletion(Response):
    choices: list[ChatChoice]
    prompt_logprobs: list[dict[str, Any] | None] | None
    prompt_token_ids: list[int] | None
    prompt_text: str | None


class TokensChoice(msgspec.Struct):
    index: int
    logprobs: dict[str, Any] | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: list[int]
    routed_experts: None
    sampling_mask: None
    text: str = ""  # in output_mode text


class TokensResponse(msgspec.Struct):
    request_id: str
    model: str
    created: int
    choices: list[TokensChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None
    prompt_token_ids: list[int] | None
    output_mode: str
    kv_transfer_params: None
    ec_transfer_params: None
    metrics: RequestTimes | None


class Rendered(msgspec.Struct):
    """A body for /inference/v1/generate."""

    request_id: str
    model: str
    token_ids: list[int]
    token_offsets: list[list[int]] | None
    sampling_params: dict[str, Any]
    stream: bool
    stream_options: dict[str, bool | None] | None
    cache_salt: str | None
    priority: int
    features: None
    assistant_tokens_mask: list[int] | None


class Model(msgspec.Struct):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    permission: list[dict[str, Any]]


class TokenizerInfo(msgspec.Struct):
    tokenizer_class: str
    model_max_length: int
    vocab_size: int
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None
    additional_special_tokens: list[str]
    added_tokens_decoder: dict[str, Any]


class ModelList(msgspec.Struct):
    object: str
    data: list[Model]


class Tokens(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(msgspec.Struct):
    prompt: str


class Version(msgspec.Struct):
    version: str


class Load(msgspec.Struct):
    server_load: int
    running: int
    waiting: int


class CacheReset(msgspec.Struct):
    reset: bool


class Aborted(msgspec.Struct):
    aborted: list[str]


class State(msgspec.Struct):
    """Current counts of requests, streams and blocks."""

    front_end: dict[str, int]
    core: dict[str, int]


class ServerInfo(msgspec.Struct):
    version: str
    model: str
    server: dict[str, Any]
    engine: dict[str, Any]
    state: State


class WorldSize(msgspec.Struct):
    world_size: int


RESPONSES: dict[str, Any] = {
    "/v1/completions": Completion,
    "/v1/completions/derender": dict[str, Any],  # a whole response, or a chunk and the state for the next
    "/v1/completions/render": list[Rendered],
    "/v1/chat/completions": ChatCompletion,
    "/v1/chat/completions/batch": ChatCompletion,
    "/v1/chat/completions/derender": dict[str, Any],
    "/v1/chat/completions/render": Rendered,
    "/inference/v1/generate": TokensResponse,
    "/tokenizer_info": TokenizerInfo,
    "/get_world_size": WorldSize,
    "/v1/models": ModelList,
    "/v1/models/{name:path}": Model,
    "/tokenize": Tokens,
    "/detokenize": Text,
    "/version": Version,
    "/load": Load,
    "/reset_prefix_cache": CacheReset,
    "/abort_requests": Aborted,
    "/server_info": ServerInfo,
}
