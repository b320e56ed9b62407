"""The body of POST /v1/messages: Anthropic's fields and vLLM's additions. Null means that a field was not given."""

from typing import Any

import msgspec

from quire.entrypoints.openai.protocol import Ignored, Int, nothing


class ToolChoice(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    type: str
    budget_tokens: Int | None = None
    display: str | None = None  # no effect: thinking is returned whole


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    format: dict[str, Any] | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """What a prompt is made of; the body of /v1/messages/count_tokens."""

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's

    # Refused unless empty
    mcp_servers: list[Any] | None = None

    # No effect
    cache_control: Ignored = msgspec.field(default_factory=nothing)
    context_management: Ignored = msgspec.field(default_factory=nothing)


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: Int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: Int | None = None
    top_p: float | None = None

    # vLLM's
    cache_salt: str | None = None
    vllm_xargs: dict[str, Any] | None = None

    # No effect
    metadata: Ignored = msgspec.field(default_factory=nothing)
    service_tier: str | None = None
    container: Ignored = msgspec.field(default_factory=nothing)
    inference_geo: str | None = None
    kv_transfer_params: Ignored = msgspec.field(default_factory=nothing)
    ec_transfer_params: Ignored = msgspec.field(default_factory=nothing)
