"""The request bodies: OpenAI's fields and vLLM's additions. Null means that a field was not given.

Fields under "no effect" are accepted because clients send them.
"""

from typing import Annotated, Any

import msgspec

# int64, so that every part of the engine can hold it; a field's own range is checked in SamplingParams.
Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Ignored = msgspec.Raw  # not decoded
NOTHING = msgspec.Raw(b"null")


def _nothing() -> msgspec.Raw:
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

    # Refused where SamplingParams has no such field
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
    mm_payload: str | None = None  # of return_mm_kwargs
    metadata: Ignored = msgspec.field(default_factory=_nothing)
    store: bool | None = None
    service_tier: str | None = None
    kv_transfer_params: Ignored = msgspec.field(default_factory=_nothing)
    ec_transfer_params: Ignored = msgspec.field(default_factory=_nothing)
    media_io_kwargs: Ignored = msgspec.field(default_factory=_nothing)
    mm_processor_kwargs: Ignored = msgspec.field(default_factory=_nothing)


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Int | None = None
    echo: bool | None = None
    best_of: Int | None = None
    suffix: str | None = None
    prompt_embeds: Any = None  # refused


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
    reasoning_effort: str | None = None  # passed to the chat template
    include_reasoning: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None  # type: ignore[assignment]  # only its prompt_token_ids count

    # Refused unless neutral
    modalities: list[str] | None = None
    audio: Any = None
    functions: list[Any] | None = None
    function_call: Any = None

    # No effect
    prediction: Ignored = msgspec.field(default_factory=_nothing)
    moderation: Ignored = msgspec.field(default_factory=_nothing)
    prompt_cache_key: str | None = None
    prompt_cache_options: Ignored = msgspec.field(default_factory=_nothing)
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    verbosity: str | None = None
    web_search_options: Ignored = msgspec.field(default_factory=_nothing)


class BatchChatRequest(ChatRequest, kw_only=True):
    """Several conversations with the same parameters; a choice for each."""

    messages: list[list[dict[str, Any]]]  # type: ignore[assignment]
    best_of: Int | None = None  # no effect, as in vLLM


class TokensRequest(EngineRequest, kw_only=True):
    """Token ids in, token ids out."""

    token_ids: list[TokenId]
    sampling_params: dict[str, Any]

    # Refused unless null
    features: Any = None
    content_parts: Any = None

    # No effect
    assistant_tokens_mask: Ignored = msgspec.field(default_factory=_nothing)
    token_offsets: Ignored = msgspec.field(default_factory=_nothing)
    kv_transfer_params: Ignored = msgspec.field(default_factory=_nothing)
    ec_transfer_params: Ignored = msgspec.field(default_factory=_nothing)


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
    media_io_kwargs: Ignored = msgspec.field(default_factory=_nothing)
    mm_processor_kwargs: Ignored = msgspec.field(default_factory=_nothing)


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[TokenId]
    model: str | None = None
    skip_special_tokens: bool | None = None
