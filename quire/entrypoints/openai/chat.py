"""POST /v1/chat/completions"""

from typing import Any

from quire.engine.input_processor import ParsedPrompt
from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.entrypoints.openai.answer import Answer, encode
from quire.entrypoints.openai.context import ServerContext
from quire.entrypoints.openai.endpoint import LONG_TEXT, GenerationEndpoint, in_thread_if
from quire.entrypoints.openai.errors import bad_request, refused_value
from quire.entrypoints.openai.logprobs import LogprobFormat, prompt_logprobs
from quire.entrypoints.openai.protocol import ChatRequest, TokenizeRequest
from quire.messages.sampling_params import SamplingParams


class ChatEndpoint(GenerationEndpoint[ChatRequest]):
    request_type = ChatRequest
    id_prefix = "chatcmpl-"
    prompt_field = "messages"

    def params(self, request: ChatRequest) -> SamplingParams:
        return self.context.params.for_chat(request)

    async def prompts(self, request: ChatRequest) -> list[ParsedPrompt]:
        named = {"documents": request.documents, "reasoning_effort": request.reasoning_effort}
        kwargs = {name: value for name, value in named.items() if value is not None}
        prompt = await render(self.context, request, kwargs)
        prompt.cache_salt = request.cache_salt
        return [prompt]

    def answer(self, id: str, model: str, request: ChatRequest, logprobs: LogprobFormat) -> Answer:
        return ChatAnswer(id, model, self.context.fingerprint, request, logprobs)


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


class ChatAnswer(Answer):
    object, chunk_object = "chat.completion", "chat.completion.chunk"
    text_opens, text_closes = b',"delta":{"content":', b"}"
    no_text = b',"delta":{}'

    def __init__(self, id: str, model: str, fingerprint: str, request: ChatRequest, logprobs: LogprobFormat) -> None:
        self.request = request
        self.before = _text_of(request.messages[-1]) if request.echo and request.continue_final_message else ""
        super().__init__(id, model, fingerprint, request, logprobs)

    @property
    def with_logprobs(self) -> bool:
        return bool(self.request.logprobs)

    def first_events(self, choice: int, place: int, output: RequestOutput) -> list[bytes]:
        beside = b""
        if choice == 0 and self.with_token_ids:
            beside += b',"prompt_token_ids":' + encode(output.prompt_token_ids)
        if choice == 0 and self.with_prompt_logprobs:
            beside += b',"prompt_logprobs":' + encode(prompt_logprobs(output.prompt_logprobs))
        delta = b',"delta":{"role":"assistant","content":%b}' % encode(self.before)
        return [self.event(choice, delta, beside=beside)]

    def choice(self, index: int, place: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        message = {"role": "assistant", "content": self.before + completion.text, "refusal": None}
        shape = {
            "index": index,
            "message": message,
            "logprobs": self.logprobs(index, completion) if self.with_logprobs else None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        return shape | ({"token_ids": completion.token_ids} if self.with_token_ids else {})

    def logprobs(self, choice: int, completion: CompletionOutput) -> dict[str, Any]:
        num_top = self.request.top_logprobs or 0
        content = self.logprob_format.chat(completion.token_ids, completion.logprobs or [], num_top)
        return {"content": content, "refusal": None}

    def extras(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self.with_token_ids:
            extras["prompt_token_ids"] = outputs[0].prompt_token_ids
        if self.with_prompt_logprobs:
            extras["prompt_logprobs"] = prompt_logprobs(outputs[0].prompt_logprobs)
        return extras


def _text_of(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
