"""The body of POST /v1/responses: OpenAI's fields and vLLM's additions. Null means that a field was not given."""

from typing import Any

import msgspec

from quire.entrypoints.openai.protocol import Ignored, Int, TokenId, nothing


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None  # no effect: reasoning is returned whole
    generate_summary: str | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None  # no effect


class CountRequest(msgspec.Struct, kw_only=True):
    """What a prompt is made of; the body of /v1/responses/input_tokens."""

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # Refused unless null
    conversation: Any = None
    prompt: Any = None


class ResponsesRequest(CountRequest, kw_only=True):
    background: bool | None = None
    include: list[str] | None = None
    max_output_tokens: Int | None = None
    max_tool_calls: Int | None = None  # of tools that the server has, of which there are none
    metadata: dict[str, str] | None = None
    store: bool | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Int | None = None

    # vLLM's
    logit_bias: dict[TokenId, float] | None = None
    include_reasoning: bool | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: Any = None
    thinking_token_budget: Int | None = None
    vllm_xargs: dict[str, Any] | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    enable_response_messages: bool | None = None

    # No effect
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    request_id: str | None = None  # ids of responses are the server's: they are keys of its store
    session_id: str | None = None
    stream_options: Ignored = msgspec.field(default_factory=nothing)
    media_io_kwargs: Ignored = msgspec.field(default_factory=nothing)
    mm_processor_kwargs: Ignored = msgspec.field(default_factory=nothing)
    kv_transfer_params: Ignored = msgspec.field(default_factory=nothing)
    ec_transfer_params: Ignored = msgspec.field(default_factory=nothing)
