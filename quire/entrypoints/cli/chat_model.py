"""The model of a chat: an engine in this process, or a server."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from quire.entrypoints.interruption import interruption
from quire.messages.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from quire.engine.llm_engine import LLMEngine
    from quire.entrypoints.chat_renderer import ChatRenderer
    from quire.entrypoints.cli.api_client import ApiClient

Messages = list[dict[str, str]]
NOT_SENT = ("n", "logprobs", "prompt_logprobs")  # the chat does not show their results


@dataclass
class ChatResponse:
    text: str
    num_tokens: int | None  # None: the server did not say
    reason: str  # OpenAI's finish_reason, or "interrupted" after Ctrl-C


class ChatModel(Protocol):
    name: str

    def answer(self, messages: Messages, settings: dict[str, Any], write: Callable[[str], None]) -> ChatResponse:
        """`settings` are the sampling parameters given explicitly. Ctrl-C stops the answer."""
        ...


class LocalModel:
    def __init__(self, engine: "LLMEngine", renderer: "ChatRenderer") -> None:
        self.engine = engine
        self.renderer = renderer
        self.name = engine.model_name
        self._count = 0

    def answer(self, messages: Messages, settings: dict[str, Any], write: Callable[[str], None]) -> ChatResponse:
        [prompt] = self.renderer.prompts([messages])
        self._count += 1
        request_id = f"chat-{self._count}"
        self.engine.add_request(request_id, prompt, SamplingParams(**settings, output_kind=RequestOutputKind.DELTA))
        tokens, parts, reason, error = 0, [], None, None
        with interruption() as interrupted:
            while reason is None and not interrupted():
                for output in self.engine.step():
                    completion = output.outputs[0]
                    parts.append(completion.text)
                    write(completion.text)
                    tokens += len(completion.token_ids)
                    reason, error = completion.finish_reason, output.error
            if reason is None:
                self.engine.abort_request(request_id)
                reason = "interrupted"
        if error is not None:
            raise ValueError(error)
        return ChatResponse("".join(parts), tokens, reason)


class RemoteModel:
    def __init__(self, client: "ApiClient", name: str) -> None:
        self.client = client
        self.name = name

    def answer(self, messages: Messages, settings: dict[str, Any], write: Callable[[str], None]) -> ChatResponse:
        sent = to_send(settings)
        if "max_tokens" in sent:
            sent["max_completion_tokens"] = sent.pop("max_tokens")  # OpenAI's newer models accept no other name
        body = {"model": self.name, "messages": messages, "stream_options": {"include_usage": True}, **sent}
        parts: list[str] = []
        tokens, reason = None, "stop"
        try:
            with self.client.stream("/chat/completions", body) as events:
                for event in events:
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                    for choice in event["choices"][:1]:
                        text = (choice.get("delta") or choice.get("message") or {}).get("content") or ""
                        reason = choice.get("finish_reason") or reason
                        if text:
                            parts.append(text)
                            write(text)
        except KeyboardInterrupt:
            reason = "interrupted"  # the closed connection aborts it on the server too
        return ChatResponse("".join(parts), tokens, reason)


def to_send(settings: dict[str, Any]) -> dict[str, Any]:
    """Only explicit settings: the server has its own defaults, and may not know every parameter."""
    return {name: value for name, value in settings.items() if value is not None and name not in NOT_SENT}
