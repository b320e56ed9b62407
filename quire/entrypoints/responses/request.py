"""A request for a response, as a chat request."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.config.shown import shown
from quire.entrypoints.http.errors import bad_request, not_available
from quire.entrypoints.openai.translated import TranslatedRequest, kind_of, string
from quire.entrypoints.responses.items import as_items, continues_last, messages
from quire.entrypoints.responses.protocol import CountRequest, ResponsesRequest

LOGPROBS = "message.output_text.logprobs"
# Those of tools and inputs that are not available have nothing to include.
INCLUDABLE = (
    LOGPROBS,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)
FORMATS = ("text", "json_object", "json_schema")
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512  # OpenAI's
CHOICES = 'none, auto, required, {"type": "function", "name": ...} or {"type": "allowed_tools", ...}'
SHARED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "logit_bias",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "structured_outputs",
    "thinking_token_budget",
    "vllm_xargs",
    "priority",
    "cache_salt",
    "include_reasoning",
    "stream",
)


class ResponsesChat(TranslatedRequest, kw_only=True):
    """`items` are all that the prompt is made of: those of earlier responses, then this request's own."""

    items: list[dict[str, Any]] = msgspec.field(default_factory=list)
    num_earlier: int = 0
    drops_oldest: bool = False  # where the prompt is too long


def chat_request(source: CountRequest, earlier: Sequence[Mapping[str, Any]]) -> ResponsesChat:
    if source.conversation is not None:
        raise not_available("conversation", "keeping conversations (use previous_response_id)")
    if source.prompt is not None:
        raise not_available("prompt", "a stored prompt")
    if source.input is None or (not source.input and not isinstance(source.input, str)):
        raise bad_request("input is required: a text, or a list of items", "input", "missing_field")
    if source.truncation not in (None, "auto", "disabled"):
        raise bad_request(f"truncation is {shown(source.truncation)}; allowed: auto, disabled", "truncation")
    own = as_items(source.input)
    conversation = messages(own)
    if earlier:
        conversation = messages([*earlier, *own])
    if source.instructions:
        conversation.insert(0, {"role": "system", "content": source.instructions})
    tools, choice = _tools(source.tools or []), source.tool_choice
    continued = continues_last(own)
    request = ResponsesChat(
        source=source,
        items=[*map(dict, earlier), *own],
        num_earlier=len(earlier),
        drops_oldest=source.truncation == "auto",
        model=source.model,
        messages=conversation,
        tools=tools or None,
        tool_choice=_choice(choice),
        parallel_tool_calls=source.parallel_tool_calls,
        chat_template_kwargs=_template_kwargs(source),
        reasoning_effort=source.reasoning.effort if source.reasoning is not None else None,
        response_format=_format(source.text.format) if source.text is not None else None,
        continue_final_message=continued or None,
        add_generation_prompt=not continued,
    )
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        request.tools, request.tool_choice = _allowed(choice, tools)
    if isinstance(source, ResponsesRequest):
        _add_sampling(request, source)
    return request


def _add_sampling(request: ResponsesChat, source: ResponsesRequest) -> None:
    for name in SHARED:
        setattr(request, name, getattr(source, name))
    for included in source.include or ():
        if included not in INCLUDABLE:
            raise bad_request(f"include has {shown(included)}; allowed: {', '.join(INCLUDABLE)}", "include")
    if LOGPROBS in (source.include or ()):
        request.logprobs, request.top_logprobs = True, source.top_logprobs
    elif source.top_logprobs:
        raise bad_request(f"top_logprobs needs {LOGPROBS} in include", "top_logprobs")
    if source.max_output_tokens is not None and source.max_output_tokens < 1:
        raise bad_request(f"max_output_tokens is {source.max_output_tokens}; it must be 1 or more", "max_output_tokens")
    request.max_completion_tokens = source.max_output_tokens
    metadata = source.metadata or {}
    too_long = any(len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE for key, value in metadata.items())
    if len(metadata) > MAX_METADATA or too_long:
        allowed = f"{MAX_METADATA} pairs, keys of {MAX_METADATA_KEY} and values of {MAX_METADATA_VALUE} characters"
        raise bad_request(f"metadata is too large; at most {allowed} are allowed", "metadata")


def _template_kwargs(source: CountRequest) -> dict[str, Any] | None:
    """Templates that think by a switch, not by an effort, are told too, as in vLLM."""
    given = dict(source.chat_template_kwargs or {})
    if source.reasoning is not None and source.reasoning.effort is not None:
        given.setdefault("enable_thinking", source.reasoning.effort != "none")
    return given or None


def _tools(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """As chat requests have them: with an object for the function."""
    tools = []
    for index, tool in enumerate(given):
        _, kind = kind_of(tool, f"tools[{index}]", "function")
        if kind != "function":
            raise bad_request(f"tools[{index}].type is {shown(kind)}; allowed: function", "tools")
        function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}
        function = {name: value for name, value in function.items() if value is not None}
        tools.append({"type": "function", "function": function})
    return tools


def _choice(choice: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    if choice is None or isinstance(choice, str):
        if choice not in (None, "none", "auto", "required"):
            raise bad_request(f"tool_choice is {shown(choice)}; allowed: {CHOICES}", "tool_choice")
        return choice
    match choice.get("type"):
        case "function":
            return {"type": "function", "function": {"name": string(choice, "name", "tool_choice")}}
        case "allowed_tools":
            return None  # see _allowed()
        case kind:
            raise bad_request(f"tool_choice.type is {shown(kind)}; allowed: {CHOICES}", "tool_choice")


def _allowed(choice: Mapping[str, Any], tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Only some of the tools may be called."""
    mode, allowed = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise bad_request(f"tool_choice.mode is {shown(mode)}; allowed: auto, required", "tool_choice")
    if not isinstance(allowed, list) or not allowed:
        raise bad_request("tool_choice.tools must be a list of {type, name}", "tool_choice")
    names = []
    for index, one in enumerate(allowed):
        where = f"tool_choice.tools[{index}]"
        names.append(string(kind_of(one, where, "function")[0], "name", where))
    offered = {tool["function"].get("name"): tool for tool in tools if isinstance(tool["function"].get("name"), str)}
    missing = [name for name in names if name not in offered]
    if missing:
        raise bad_request(f"tool_choice names {shown(missing[0])}, which is not in tools", "tool_choice")
    return [offered[name] for name in dict.fromkeys(names)], str(mode)


def _format(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if given is None:
        return None
    match given.get("type"):
        case "text":
            return None
        case "json_object":
            return {"type": "json_object"}
        case "json_schema":
            schema = given.get("schema")
            if schema is None:
                raise bad_request("text.format.schema is required with type json_schema", "text")
            return {"type": "json_schema", "json_schema": {"name": given.get("name"), "schema": schema}}
        case kind:
            raise bad_request(f"text.format.type is {shown(kind)}; allowed: {', '.join(FORMATS)}", "text")
