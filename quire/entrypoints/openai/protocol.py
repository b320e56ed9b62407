"""The request bodies: OpenAI's fields and vLLM's additions. Null means that a field was not given.

Fields under "no effect" are accepted because clients send them.
"""

from typing import Annotated, Any

import msgspec

# int64, so that every part of the engine can hold it; a field's own range is checked in SamplingParams.
Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]  # of tokens
Ignored = msgspec.Raw  # not decoded
NOTHING = msgspec.Raw(b"null")


def nothing() -> msgspec.Raw:
    return NOTHING


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # no effect


class EngineRequest(msgspec.Struct, kw_only=True):
    """What every request that generates has."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    request_id: str | None = None


class GenerationRequest(EngineRequest, kw_only=True):
    """What completions and chat completions share."""

    n: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    max_tokens: Int | None = None
    logit_bias: dict[TokenId, float] | None = None

    # vLLM's
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Int | None = None
    truncation_side: str | None = None
    prompt_logprobs: Int | None = None
    repetition_detection: dict[str, Int] | None = None
    thinking_token_budget: Int | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    vllm_xargs: dict[str, Any] | None = None  # for custom logits processors

    # Structured output: see structured.py
    response_format: dict[str, Any] | None = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None

    # See beam.py
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None

    logprob_token_ids: list[TokenId] | None = None
    stream_interval: Int | None = None

    # Refused unless neutral
    watermarking: bool | None = None
    routed_experts_prompt_start: Int | None = None
    return_mm_kwargs: bool | None = None

    # No effect
    user: str | None = None
    session_id: str | None = None
    return_token_offsets: bool | None = None  # of /render
    mm_payload: Ignored = msgspec.field(default_factory=nothing)  # of /render, with images
    metadata: Ignored = msgspec.field(default_factory=nothing)
    store: bool | None = None
    service_tier: str | None = None
    kv_transfer_params: Ignored = msgspec.field(default_factory=nothing)
    ec_transfer_params: Ignored = msgspec.field(default_factory=nothing)
    media_io_kwargs: Ignored = msgspec.field(default_factory=nothing)
    mm_processor_kwargs: Ignored = msgspec.field(default_factory=nothing)


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]] | None = None
    prompt_embeds: str | list[str] | None = None  # see prompt_embeds.py
    logprobs: Int | None = None
    echo: bool | None = None
    best_of: Int | None = None
    suffix: str | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    # vLLM's
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    return_prompt_text: bool | None = None
    return_assistant_tokens_mask: bool | None = None  # of /render
    reasoning_effort: str | None = None  # passed to the chat template
    include_reasoning: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None  # type: ignore[assignment]  # only its prompt_token_ids count

    # Refused unless neutral
    modalities: list[str] | None = None
    audio: Any = None
    functions: list[Any] | None = None
    function_call: Any = None

    # No effect
    prediction: Ignored = msgspec.field(default_factory=nothing)
    moderation: Ignored = msgspec.field(default_factory=nothing)
    prompt_cache_key: str | None = None
    prompt_cache_options: Ignored = msgspec.field(default_factory=nothing)
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    verbosity: str | None = None
    web_search_options: Ignored = msgspec.field(default_factory=nothing)


class BatchChatRequest(ChatRequest, kw_only=True):
    """Several conversations with the same parameters; a choice for each."""

    messages: list[list[dict[str, Any]]]  # type: ignore[assignment]
    best_of: Int | None = None  # no effect, as in vLLM


class TokensRequest(EngineRequest, kw_only=True):
    """Token ids in, token ids out."""

    token_ids: list[TokenId]
    sampling_params: dict[str, Any]
    output_mode: str | None = None
    return_token_ids: bool | None = None

    # Refused unless null
    features: Any = None
    content_parts: Any = None

    # No effect
    assistant_tokens_mask: Ignored = msgspec.field(default_factory=nothing)
    token_offsets: Ignored = msgspec.field(default_factory=nothing)
    kv_transfer_params: Ignored = msgspec.field(default_factory=nothing)
    ec_transfer_params: Ignored = msgspec.field(default_factory=nothing)


class GeneratedLogprob(msgspec.Struct, kw_only=True):
    token_id: TokenId
    logprob: float
    rank: Int | None = None
    top_logprobs: list["GeneratedLogprob"] = []


class GeneratedLogprobs(msgspec.Struct, kw_only=True):
    content: list[GeneratedLogprob] | None = None


class GeneratedChoice(msgspec.Struct, kw_only=True):
    index: Int
    token_ids: list[TokenId] | None = None
    logprobs: GeneratedLogprobs | None = None
    finish_reason: str | None = "stop"
    stop_reason: Int | str | None = None


class GeneratedUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None


class GeneratedTokens(msgspec.Struct, kw_only=True):
    """A response of /inference/v1/generate."""

    choices: list[GeneratedChoice]
    request_id: str | None = None
    output_mode: str = "tokens"
    prompt_token_ids: list[TokenId] | None = None
    prompt_logprobs: Ignored = msgspec.field(default_factory=nothing)  # passed through
    usage: GeneratedUsage | None = None


class GeneratedChunkChoice(GeneratedChoice, kw_only=True):
    finish_reason: str | None = None


class GeneratedChunk(GeneratedTokens, kw_only=True):
    """An event of a stream of /inference/v1/generate."""

    choices: list[GeneratedChunkChoice]  # type: ignore[assignment]


class DerenderState(msgspec.Struct, kw_only=True):
    """What a client carries from one chunk of a choice to the next."""

    output_token_ids: list[TokenId] = []
    started: bool = False


class DerenderRequest(msgspec.Struct, kw_only=True):
    """Generated tokens, to become a response of the request that was rendered; or one event of a stream of them."""

    model: str | None = None
    stream: bool | None = None
    generate_chunk: GeneratedChunk | None = None
    stream_state: DerenderState | None = None


class DerenderChatRequest(DerenderRequest, kw_only=True):
    generate_response: GeneratedTokens | None = None
    prompt_tokens: Count | None = None
    prompt_token_ids: list[TokenId] | None = None
    chat_request: ChatRequest | None = None


class DerenderCompletionRequest(DerenderRequest, kw_only=True):
    generate_responses: list[GeneratedTokens] | None = None
    prompt_tokens: Count | list[Count] | None = None  # of a chunk, or for each response
    prompt_token_ids: list[TokenId | list[TokenId] | None] | None = None
    completion_request: CompletionRequest | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None

    # No effect
    media_io_kwargs: Ignored = msgspec.field(default_factory=nothing)
    mm_processor_kwargs: Ignored = msgspec.field(default_factory=nothing)


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[TokenId]
    model: str | None = None
    skip_special_tokens: bool | None = None
