"""POST /v1/chat/completions/batch: several conversations with the same parameters, answered in one response."""

from collections.abc import Sequence
from typing import Any

from quire.engine.input_processor import ParsedPrompt
from quire.entrypoints.http.context import ServerContext
from quire.entrypoints.http.errors import bad_request
from quire.entrypoints.openai.chat import ChatEndpoint
from quire.entrypoints.openai.endpoint import Answer, GenerationEndpoint
from quire.entrypoints.openai.logprobs import LogprobFormat
from quire.entrypoints.openai.params import ParamsBuilder
from quire.entrypoints.openai.protocol import BatchChatRequest, ChatRequest
from quire.messages.sampling_params import SamplingParams

# Their effect would depend on the conversation.
REFUSED = ("stream", "tools", "use_beam_search", "echo", "continue_final_message", "kv_transfer_params")


class BatchChatEndpoint(GenerationEndpoint[BatchChatRequest]):
    request_type = BatchChatRequest
    id_prefix = "chatcmpl-"
    prompt_field = "messages"

    def __init__(self, context: ServerContext, params: ParamsBuilder, chat: ChatEndpoint) -> None:
        super().__init__(context, params)
        self.chat = chat

    def params(self, request: BatchChatRequest) -> SamplingParams:
        self.sources(request)
        for name in REFUSED:
            if getattr(request, name):
                raise bad_request(f"{name} cannot be used with several conversations; send them one by one", name)
        if request.add_generation_prompt is False:
            message = "add_generation_prompt cannot be false with several conversations; send them one by one"
            raise bad_request(message, "add_generation_prompt")
        if request.n not in (None, 1):
            raise bad_request(f"n is {request.n}; a batch has one choice for each conversation", "n")
        return self.chat.params(self._one(request))

    def sources(self, request: BatchChatRequest) -> Sequence[Any]:
        most = self.context.config.max_prompts
        if not 1 <= len(request.messages) <= most:
            message = f"messages holds {len(request.messages)} conversations; 1 to {most} are allowed (--max-prompts)"
            raise bad_request(message, "messages")
        return request.messages

    def prompts(self, request: BatchChatRequest, sources: Sequence[Any], size: int) -> list[ParsedPrompt]:
        return [
            prompt
            for index in range(len(sources))
            for prompt in self.chat.prompts(self._one(request, index), [sources[index]], size)
        ]

    def takes_long(self, request: BatchChatRequest, size: int) -> bool:
        return len(request.messages) > 1 or self.chat.takes_long(self._one(request), size)

    def adjusted(
        self, request: BatchChatRequest, params: SamplingParams, prompts: list[ParsedPrompt]
    ) -> SamplingParams:
        return self.chat.adjusted(self._one(request), params, prompts)

    def response(self, id: str, model: str, request: BatchChatRequest, logprobs: LogprobFormat) -> Answer:
        return self.chat.response(id, model, self._one(request), logprobs)

    def _one(self, request: BatchChatRequest, index: int = 0) -> ChatRequest:
        """The request for one of the conversations."""
        fields = {name: getattr(request, name) for name in ChatRequest.__struct_fields__}
        return ChatRequest(**fields | {"messages": request.messages[index]})
