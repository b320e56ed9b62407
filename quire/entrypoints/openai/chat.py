"""POST /v1/chat/completions"""

from typing import Any

from quire.engine.input_processor import ParsedPrompt
from quire.entrypoints.openai.answer import Answer
from quire.entrypoints.openai.chat_answer import ChatAnswer, text_of
from quire.entrypoints.openai.context import ServerContext
from quire.entrypoints.openai.endpoint import LONG_TEXT, GenerationEndpoint, in_thread_if
from quire.entrypoints.openai.errors import bad_request, refused_value
from quire.entrypoints.openai.logprobs import LogprobFormat
from quire.entrypoints.openai.parsed_chat import ParsedChatAnswer
from quire.entrypoints.openai.parsing import Parsing, ReasoningSetup
from quire.entrypoints.openai.protocol import ChatRequest, TokenizeRequest
from quire.entrypoints.openai.tools.request import ToolSetup
from quire.messages.sampling_params import SamplingParams


class ChatEndpoint(GenerationEndpoint[ChatRequest]):
    request_type = ChatRequest
    id_prefix = "chatcmpl-"
    prompt_field = "messages"

    def __init__(self, context: ServerContext) -> None:
        super().__init__(context)
        name, tokenizer = context.config.reasoning_parser, context.engine.tokenizer
        self.reasoning = ReasoningSetup(name, tokenizer) if name is not None and tokenizer is not None else None
        self.tools = ToolSetup(context.config, tokenizer)

    def params(self, request: ChatRequest) -> SamplingParams:
        return self.context.params.for_chat(request)

    async def prompts(self, request: ChatRequest) -> list[ParsedPrompt]:
        self.tools.check(request)
        named = {"documents": request.documents, "reasoning_effort": request.reasoning_effort}
        kwargs = {name: value for name, value in named.items() if value is not None}
        prompt = await render(self.context, request, kwargs)
        prompt.cache_salt = request.cache_salt
        return [prompt]

    def adjusted(self, request: ChatRequest, params: SamplingParams, prompts: list[ParsedPrompt]) -> SamplingParams:
        parsing = self.parsing(request)
        return params if parsing is None else parsing.adjust(params, prompts[0].text or "")

    def answer(self, id: str, model: str, request: ChatRequest, logprobs: LogprobFormat) -> Answer:
        parsing = self.parsing(request)
        if parsing is None:
            return ChatAnswer(id, model, self.context.fingerprint, request, logprobs)
        return ParsedChatAnswer(id, model, self.context.fingerprint, request, logprobs, parsing)

    def parsing(self, request: ChatRequest) -> Parsing | None:
        """None where the text is the answer as it is."""
        tools = self.tools.use(request)
        if self.reasoning is None and tools is None:
            return None
        continued = text_of(request.messages[-1]) if request.continue_final_message and request.messages else None
        return Parsing(self.reasoning, continued, tools)


async def render(
    context: ServerContext, request: ChatRequest | TokenizeRequest, template_kwargs: dict[str, Any]
) -> ParsedPrompt:
    if request.chat_template is not None and not context.config.trust_request_chat_template:
        raise bad_request(
            "chat_template in a request is only allowed on servers started with --trust-request-chat-template",
            "chat_template",
        )
    messages = request.messages or []
    goes_on = bool(request.continue_final_message)
    begins = not goes_on if request.add_generation_prompt is None else request.add_generation_prompt
    renderer = context.renderer

    def rendered() -> ParsedPrompt:
        return renderer.prompts(
            [messages],
            chat_template=request.chat_template,
            tools=request.tools,
            add_generation_prompt=begins,
            continue_final_message=goes_on,
            template_kwargs=template_kwargs | (request.chat_template_kwargs or {}),
        )[0]

    long = request.chat_template is not None or sum(map(_length, messages)) > LONG_TEXT
    try:
        return await in_thread_if(long, rendered)
    except ValueError as error:
        raise refused_value(error, request.__struct_fields__, "messages") from None


def _length(message: dict[str, Any]) -> int:
    content = message.get("content")
    return len(content) if isinstance(content, str) else LONG_TEXT if isinstance(content, list) else 0
