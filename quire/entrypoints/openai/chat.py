"""POST /v1/chat/completions"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.config.server import ServerConfig
from quire.engine.input_processor import ParsedPrompt
from quire.entrypoints.http.context import LONG_TEXT, ServerContext
from quire.entrypoints.http.errors import bad_request
from quire.entrypoints.openai.chat_response import ChatResponse, text_of
from quire.entrypoints.openai.endpoint import Answer, GenerationEndpoint
from quire.entrypoints.openai.errors import refused_value
from quire.entrypoints.openai.logprobs import LogprobFormat
from quire.entrypoints.openai.output_parsing import OutputParsing, ReasoningSetup
from quire.entrypoints.openai.params import ParamsBuilder, truncated_right
from quire.entrypoints.openai.parsed_chat_response import ParsedChatResponse
from quire.entrypoints.openai.protocol import ChatRequest, TokenizeRequest
from quire.entrypoints.openai.tool_request import ToolSetup
from quire.entrypoints.parsers.detect import JSON
from quire.entrypoints.parsers.plugins import load_plugin
from quire.entrypoints.tool_prompt import describe_tools, mentions_tools, takes_tools
from quire.messages.sampling_params import SamplingParams
from quire.tokenizer.chat_template import Marks, new_marks, without_marks


@dataclass
class ChatPrompt(ParsedPrompt):
    assistant_spans: Sequence[tuple[int, int]] | None = None  # of the text, where asked for and marked by the template


class ChatEndpoint(GenerationEndpoint[ChatRequest]):
    request_type = ChatRequest
    id_prefix = "chatcmpl-"
    prompt_field = "messages"

    def __init__(self, context: ServerContext, params: ParamsBuilder) -> None:
        super().__init__(context, params)
        config, tokenizer = context.config, context.engine.tokenizer
        load_plugins(config)
        names = context.parsers
        self.reasoning = ReasoningSetup.of(context)
        self.tools = ToolSetup(names.tools, config.max_tools, tokenizer)

    def params(self, request: ChatRequest) -> SamplingParams:
        return self.builder.for_chat(request)

    def sources(self, request: ChatRequest) -> Sequence[Any]:
        return [request.messages]

    def prompts(self, request: ChatRequest, sources: Sequence[Any], size: int) -> list[ParsedPrompt]:
        return self.marked_prompts(request, size, None)

    def rendered(self, request: ChatRequest, sources: Sequence[Any], size: int) -> list[ParsedPrompt]:
        return self.marked_prompts(request, size, new_marks() if request.return_assistant_tokens_mask else None)

    def marked_prompts(self, request: ChatRequest, size: int, marks: Marks | None) -> list[ParsedPrompt]:
        self.tools.check(request)
        forwarded = (request.kv_transfer_params or {}).get("prompt_token_ids")
        if forwarded is not None:
            return [self._forwarded(forwarded)]
        if request.tool_choice == "none" and self.context.config.exclude_tools_when_tool_choice_none:
            request.tools = None
        named = {"documents": request.documents, "reasoning_effort": request.reasoning_effort}
        kwargs = {name: value for name, value in named.items() if value is not None}
        prompt = render(self.context, request, kwargs, size, marks)
        self.check_length(request.truncate_prompt_tokens is not None, len(prompt.token_ids))
        prompt.token_ids = truncated_right(request, prompt.token_ids, self.context.engine.max_model_len - 1)
        return [prompt]

    def _forwarded(self, ids: Any) -> ParsedPrompt:
        """The prompt as the server that prefills it has tokenized it."""
        if not isinstance(ids, list) or not ids or not all(type(id) is int for id in ids):
            raise bad_request("kv_transfer_params: prompt_token_ids must be a list of token ids", "kv_transfer_params")
        self.check_length(False, len(ids))
        size = self.builder.vocab_size or self.context.tokenizer.vocab_size
        if not all(0 <= id < size for id in ids):
            message = f"kv_transfer_params: prompt_token_ids must be between 0 and {size - 1}"
            raise bad_request(message, "kv_transfer_params")
        return ParsedPrompt(self.context.tokenizer.decode(ids, skip_special_tokens=False), ids)

    def takes_long(self, request: ChatRequest, size: int) -> bool:
        return takes_long(request, size)

    def adjusted(self, request: ChatRequest, params: SamplingParams, prompts: list[ParsedPrompt]) -> SamplingParams:
        parsing = self.parsing(request)
        return params if parsing is None else parsing.adjust(params, prompts[0].text or "")

    def response(self, id: str, model: str, request: ChatRequest, logprobs: LogprobFormat) -> Answer:
        return self.chat_response(id, model, request, logprobs)

    def chat_response(self, id: str, model: str, request: ChatRequest, logprobs: LogprobFormat) -> ChatResponse:
        parsing = self.parsing(request)
        role = self.context.config.response_role if generates_message(request) else role_of(request.messages[-1])
        if parsing is None:
            return ChatResponse(id, model, self.options, request, logprobs, role)
        return ParsedChatResponse(id, model, self.options, request, logprobs, role, parsing)

    def parsing(self, request: ChatRequest) -> OutputParsing | None:
        """None if the generated text is the content, unparsed."""
        tools = self.tools.use(request)
        if self.reasoning is None and tools is None:
            return None
        continued = text_of(request.messages[-1]) if request.continue_final_message and request.messages else None
        return OutputParsing(self.reasoning, continued, tools)


def takes_long(request: ChatRequest | TokenizeRequest, size: int) -> bool:
    """A chat template from the request may take seconds, however short the body is."""
    return size > LONG_TEXT or request.chat_template is not None


def render(
    context: ServerContext,
    request: ChatRequest | TokenizeRequest,
    template_kwargs: dict[str, Any],
    size: int,
    marks: Marks | None = None,
) -> ChatPrompt:
    """`size` is the body's, in bytes: an upper bound on the length of its texts. `marks` are put around the assistant's
    words, and become spans."""
    if request.chat_template is not None and not context.config.trust_request_chat_template:
        raise bad_request(
            "chat_template in a request is only allowed on servers started with --trust-request-chat-template",
            "chat_template",
        )
    messages, tools, config = request.messages or [], request.tools, context.config
    for name, given, most in (("messages", messages, config.max_messages), ("tools", tools, config.max_tools)):
        if given is not None and len(given) > most:
            flag = f"--max-{name}"
            raise bad_request(f"{name} holds {len(given)} entries; at most {most} are allowed ({flag})", name)
    kwargs = (config.default_chat_template_kwargs or {}) | template_kwargs | (request.chat_template_kwargs or {})
    if size > LONG_TEXT or config.max_prompt_chars is not None:
        context.check_chars(count_chars([messages, tools, kwargs]), "messages")
    try:
        if context.parsers.tools == JSON and mentions_tools(messages, tools):
            template = request.chat_template or context.renderer.template or ""
            if not takes_tools(template):
                offered = tools if getattr(request, "tool_choice", None) != "none" else None
                messages, tools = describe_tools(messages, offered, template), None
        text = context.renderer.render(
            messages,
            chat_template=request.chat_template,
            tools=tools,
            add_generation_prompt=generates_message(request),
            continue_final_message=bool(request.continue_final_message),
            template_kwargs=kwargs,
            marks=marks,
        )
        text, spans = without_marks(text, marks) if marks is not None else (text, [])
        context.check_chars(len(text), "messages")
        return ChatPrompt(text, context.tokenizer.encode(text, add_special_tokens=False), assistant_spans=spans or None)
    except ValueError as error:
        raise refused_value(error, request.__struct_fields__, "messages") from None


def generates_message(request: ChatRequest | TokenizeRequest) -> bool:
    """Whether the response is a message of its own, not the rest of the last one."""
    given = request.add_generation_prompt
    return not request.continue_final_message if given is None else given


def role_of(message: dict[str, Any]) -> str:
    return str(message.get("role", "assistant"))


def load_plugins(config: ServerConfig) -> None:
    if config.reasoning_parser_plugin:
        load_plugin(config.reasoning_parser_plugin, "--reasoning-parser-plugin")
    if config.tool_parser_plugin:
        load_plugin(config.tool_parser_plugin, "--tool-parser-plugin")


def count_chars(value: Any) -> int:
    """Total length of all strings in a JSON value, including keys."""
    count, left = 0, [value]
    while left:
        part = left.pop()
        if isinstance(part, str):
            count += len(part)
        elif isinstance(part, dict):
            left += part.keys()
            left += part.values()
        elif isinstance(part, list):
            left += part
    return count
