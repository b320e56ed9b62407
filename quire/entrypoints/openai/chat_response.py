"""Responses of /v1/chat/completions."""

from typing import Any

from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.entrypoints.openai.logprobs import LogprobFormat, prompt_logprobs
from quire.entrypoints.openai.protocol import ChatRequest
from quire.entrypoints.openai.response import ResponseBuilder, encode


class ChatResponse(ResponseBuilder):
    object, chunk_object = "chat.completion", "chat.completion.chunk"
    text_prefix, text_suffix = b',"delta":{"content":', b"}"
    no_text = b',"delta":{}'

    def __init__(
        self, id: str, model: str, fingerprint: str, request: ChatRequest, logprobs: LogprobFormat, role: str
    ) -> None:
        self.request = request
        self.role = role
        self.echoed = text_of(request.messages[-1]) if request.echo and request.continue_final_message else ""
        super().__init__(id, model, fingerprint, request, logprobs)

    @property
    def with_logprobs(self) -> bool:
        return bool(self.request.logprobs)

    def first_events(self, choice: int, prompt_index: int, output: RequestOutput) -> list[bytes]:
        event_fields = b""
        if choice == 0 and self.with_token_ids:
            event_fields += b',"prompt_token_ids":' + encode(output.prompt_token_ids)
        if choice == 0 and self.with_prompt_logprobs:
            event_fields += b',"prompt_logprobs":' + encode(prompt_logprobs(output.prompt_logprobs))
        delta = b',"delta":{"role":%b,"content":%b}' % (encode(self.role), encode(self.echoed))
        return [self.event(choice, delta, event_fields=event_fields)]

    def choice(
        self, index: int, prompt_index: int, output: RequestOutput, completion: CompletionOutput
    ) -> dict[str, Any]:
        message = {"role": self.role, "content": self.echoed + completion.text, "refusal": None}
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


def text_of(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
