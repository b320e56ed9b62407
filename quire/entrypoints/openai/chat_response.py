"""Responses of /v1/chat/completions."""

from typing import Any

from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.entrypoints.openai.logprobs import LogprobFormat, prompt_logprobs
from quire.entrypoints.openai.protocol import ChatRequest
from quire.entrypoints.openai.response import ResponseBuilder, ResponseOptions, encode
from quire.messages.sampling_params import ALL_LOGPROBS


class ChatResponse(ResponseBuilder):
    object, chunk_object = "chat.completion", "chat.completion.chunk"
    text_prefix, text_suffix = b',"delta":{"content":', b"}"
    no_text = b',"delta":{}'

    def __init__(
        self, id: str, model: str, options: ResponseOptions, request: ChatRequest, logprobs: LogprobFormat, role: str
    ) -> None:
        self.request = request
        self.role = role
        self.echoed = text_of(request.messages[-1]) if request.echo and request.continue_final_message else ""
        super().__init__(id, model, options, request, logprobs)

    @property
    def with_logprobs(self) -> bool:
        return bool(self.request.logprobs)

    def first_events(self, choice: int, prompt_index: int, output: RequestOutput) -> list[bytes]:
        event_fields = b""
        if choice == 0 and self.with_token_ids:
            event_fields += b',"prompt_token_ids":' + encode(output.prompt_token_ids)
        if choice == 0 and self.with_prompt_logprobs:
            event_fields += b',"prompt_logprobs":' + encode(prompt_logprobs(output.prompt_logprobs))
        if choice == 0 and self.request.return_prompt_text:
            event_fields += b',"prompt_text":' + encode(output.prompt)
        delta = b',"delta":{"role":%b,"content":%b}' % (encode(self.role), encode(self.echoed))
        return [self.event(choice, delta, event_fields=event_fields)]

    def choice(
        self, index: int, prompt_index: int, output: RequestOutput, completion: CompletionOutput
    ) -> dict[str, Any]:
        return {
            "index": index,
            "message": self.message(self.echoed + completion.text),
            "logprobs": self.logprobs(index, completion) if self.with_logprobs else None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "token_ids": completion.token_ids if self.with_token_ids else None,
            "routed_experts": None,
        }

    def message(self, content: str | None, reasoning: str | None = None) -> dict[str, Any]:
        return {
            "role": self.role,
            "content": content,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": reasoning,
        }

    def logprobs(self, choice: int, completion: CompletionOutput) -> dict[str, Any]:
        num_top = ALL_LOGPROBS if self.request.logprob_token_ids else self.request.top_logprobs or 0
        content = self.logprob_format.chat(completion.token_ids, completion.logprobs or [], num_top)
        return {"content": content, "refusal": None}

    def extras(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        first = outputs[0]
        return {
            "prompt_logprobs": prompt_logprobs(first.prompt_logprobs) if self.with_prompt_logprobs else None,
            "prompt_token_ids": first.prompt_token_ids if self.with_token_ids else None,
            "prompt_text": first.prompt if self.request.return_prompt_text else None,
        }


def text_of(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        texts = (part.get("text") for part in content if isinstance(part, dict))
        return "".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""
