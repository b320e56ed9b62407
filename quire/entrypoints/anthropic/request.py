"""A request for a message, as a chat request."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.config.shown import shown
from quire.entrypoints.anthropic.protocol import CountTokensRequest, MessagesRequest, OutputConfig, Thinking, ToolChoice
from quire.entrypoints.http.errors import bad_request, not_available
from quire.entrypoints.openai.response import encode
from quire.entrypoints.openai.translated import TranslatedRequest, kind_of, param_of, string

ROLES = ("user", "assistant", "system")
BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
EFFORTS = ("low", "medium", "high", "xhigh", "max")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}  # of tools -> in chat requests
THINKING = ("enabled", "disabled", "adaptive")


def chat_request(source: CountTokensRequest, counts_reasoning: bool) -> TranslatedRequest:
    """`counts_reasoning`: the server can tell how many tokens the model thinks."""
    if source.mcp_servers:
        raise not_available("mcp_servers", "calling MCP servers")
    conversation: list[dict[str, Any]] = []
    if source.system:
        conversation.append({"role": "system", "content": _text(source.system, "system", ("text",))})
    for index, message in enumerate(source.messages):
        conversation += _messages(message, f"messages[{index}]")
    # An answer that has begun is continued; one without text would be empty.
    last = conversation[-1] if source.messages else {}
    continued = last.get("role") == "assistant" and bool(last.get("content")) and "tool_calls" not in last
    config, thinking = source.output_config or OutputConfig(), source.thinking
    if config.effort not in (None, *EFFORTS):
        raise bad_request(f"output_config.effort is {shown(config.effort)}; allowed: {', '.join(EFFORTS)}")
    request = TranslatedRequest(
        source=source,
        model=source.model,
        messages=conversation,
        tools=_tools(source.tools or []) or None,
        tool_choice=_choice(source.tool_choice),
        parallel_tool_calls=not (source.tool_choice and source.tool_choice.disable_parallel_tool_use),
        chat_template_kwargs=_template_kwargs(source, thinking),
        reasoning_effort=config.effort,
        include_reasoning=thinking is None or thinking.type != "disabled",
        response_format=_format(config.format),
        continue_final_message=continued or None,
        add_generation_prompt=not continued,
    )
    if isinstance(source, MessagesRequest):
        if source.max_tokens < 1:
            raise bad_request(f"max_tokens is {source.max_tokens}; it must be 1 or more", "max_tokens")
        request.max_completion_tokens = source.max_tokens
        request.stop = source.stop_sequences
        for name in ("stream", "temperature", "top_k", "top_p", "cache_salt", "vllm_xargs"):
            setattr(request, name, getattr(source, name))
        if thinking is not None and thinking.type == "enabled":
            _check_budget(thinking, source.max_tokens)
            if counts_reasoning:
                request.thinking_token_budget = thinking.budget_tokens
    return request


def _check_budget(thinking: Thinking, max_tokens: int) -> None:
    budget = thinking.budget_tokens
    if budget is None or not 1 <= budget < max_tokens:
        given = "missing" if budget is None else str(budget)
        raise bad_request(f"thinking.budget_tokens is {given}; it must be 1 or more, and less than max_tokens")


def _template_kwargs(source: CountTokensRequest, thinking: Thinking | None) -> dict[str, Any] | None:
    given = dict(source.chat_template_kwargs or {})
    if thinking is not None:
        if thinking.type not in THINKING:
            raise bad_request(f"thinking.type is {shown(thinking.type)}; allowed: {', '.join(THINKING)}", "thinking")
        given.setdefault("enable_thinking", thinking.type != "disabled")
    return given or None


def _messages(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Results of tools are messages of their own."""
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise bad_request(f"{where}.role is {shown(role)}; allowed: {', '.join(ROLES)}", "messages")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise bad_request(f"{where}.content must be a string or a list of blocks", "messages")
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for index, given in enumerate(content):
        at = f"{where}.content[{index}]"
        block, kind = kind_of(given, at, ", ".join(BLOCKS[role]))
        if kind not in BLOCKS[role]:
            raise _refused(kind, at, BLOCKS[role])
        match kind:
            case "text":
                texts.append(string(block, "text", at))
            case "thinking":
                thoughts.append(string(block, "thinking", at))
            case "tool_use":
                calls.append(_call(block, at))
            case "tool_result":
                result = _text(block.get("content", ""), f"{at}.content", ("text",))
                id = string(block, "tool_use_id", at)
                results.append({"role": "tool", "tool_call_id": id, "content": result})
    if results and not texts:
        return results
    own: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if thoughts:
        own["reasoning_content"] = "\n".join(thoughts)
    if calls:
        own["tool_calls"] = calls
        own["content"] = own["content"] or None
    return [*results, own]


def _call(block: Mapping[str, Any], at: str) -> dict[str, Any]:
    arguments = block.get("input", {})
    if not isinstance(arguments, Mapping):
        raise bad_request(f"{at}.input must be an object, not {type(arguments).__name__}", "messages")
    function = {"name": string(block, "name", at), "arguments": encode(arguments).decode()}
    return {"id": string(block, "id", at), "type": "function", "function": function}


def _text(content: Any, where: str, allowed: tuple[str, ...]) -> str:
    """A text, or text blocks."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or a list of blocks", param_of(where))
    texts = []
    for index, given in enumerate(content):
        block, kind = kind_of(given, f"{where}[{index}]", ", ".join(allowed))
        if kind not in allowed:
            raise _refused(kind, f"{where}[{index}]", allowed)
        texts.append(string(block, "text", f"{where}[{index}]"))
    return "\n".join(texts)


def _refused(kind: str, where: str, allowed: Sequence[str]) -> Exception:
    what = " (images are not available yet)" if kind == "image" else ""
    return bad_request(f"{where}.type is {shown(kind)}; allowed: {', '.join(allowed)}{what}", param_of(where))


def _tools(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    tools = []
    for index, tool in enumerate(given):
        where = f"tools[{index}]"
        _, kind = kind_of(tool, where, "custom", default="custom")
        if kind != "custom":
            raise bad_request(f"{where}.type is {shown(kind)}; allowed: custom", "tools")
        schema = tool.get("input_schema")
        if not isinstance(schema, Mapping):
            raise bad_request(f"{where}.input_schema must be a JSON schema, an object", "tools")
        function = {"name": tool.get("name"), "parameters": {"type": "object", **schema}}
        for name in ("description", "strict"):
            if tool.get(name) is not None:
                function[name] = tool[name]
        tools.append({"type": "function", "function": function})
    return tools


def _choice(choice: ToolChoice | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    if choice.type == "tool":
        if not choice.name:
            raise bad_request("tool_choice.name is required with type tool", "tool_choice")
        return {"type": "function", "function": {"name": choice.name}}
    if choice.type not in CHOICES:
        raise bad_request(f"tool_choice.type is {shown(choice.type)}; allowed: {', '.join(CHOICES)}, tool")
    return CHOICES[choice.type]


def _format(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if given is None:
        return None
    if given.get("type") != "json_schema":
        raise bad_request(f"output_config.format.type is {shown(given.get('type'))}; allowed: json_schema")
    if given.get("schema") is None:
        raise bad_request("output_config.format.schema is required", "output_config")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": given["schema"]}}
