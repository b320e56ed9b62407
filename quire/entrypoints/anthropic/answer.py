"""Messages and their streams of events."""

import hashlib
from typing import Any

import msgspec

from quire.engine.outputs import RequestOutput
from quire.entrypoints.anthropic.errors import error_body
from quire.entrypoints.http.errors import SERVER, ApiError
from quire.entrypoints.openai.blocks import CALL, REASONING, Block, BlockAnswer
from quire.entrypoints.openai.output_parsing import OutputParsing
from quire.entrypoints.openai.response import KEEP_ALIVE, encode
from quire.entrypoints.openai.translated import TranslatedRequest

STOP_REASONS = {"length": "max_tokens"}


class MessagesAnswer(BlockAnswer):
    """A block is a content block. `block_size` is the prefix cache's, None without one."""

    def __init__(
        self, id: str, model: str, request: TranslatedRequest, parsing: OutputParsing | None, block_size: int | None
    ) -> None:
        super().__init__(parsing, request.include_reasoning is not False)
        self.head: dict[str, Any] = {"id": id, "type": "message", "role": "assistant", "model": model}
        self.stop_sequences = request.stop or ()
        self.block_size = block_size
        self._started = False

    # Events

    def start(self, output: RequestOutput) -> bytes:
        self._started = True
        usage = {"input_tokens": self.usage.prompt_tokens, "output_tokens": 0}
        message: dict[str, Any] = self.head | {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return _event("message_start", message=message) + _event("ping")

    @property
    def keep_alive(self) -> bytes:
        return _event("ping") if self._started else KEEP_ALIVE

    def opened(self, block: Block) -> bytes:
        return _event("content_block_start", index=block.index, content_block=_content(block, empty=True))

    def extended(self, block: Block, text: str, logprobs: list[Any]) -> bytes:
        if block.kind == CALL:
            delta = {"type": "input_json_delta", "partial_json": text}
        elif block.kind == REASONING:
            delta = {"type": "thinking_delta", "thinking": text}
        else:
            delta = {"type": "text_delta", "text": text}
        return _event("content_block_delta", index=block.index, delta=delta)

    def closed(self, block: Block) -> bytes:
        signed = b""
        if block.kind == REASONING:
            delta = {"type": "signature_delta", "signature": _signature(block.text)}
            signed = _event("content_block_delta", index=block.index, delta=delta)
        return signed + _event("content_block_stop", index=block.index)

    def last_events(self) -> bytes:
        if self.finish_reason == "abort":
            return self.failed(ApiError(503, "the request was aborted", type=SERVER, code="aborted"))
        reason, sequence = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return _event("message_delta", delta=delta, usage=self._usage()) + _event("message_stop")

    def failed(self, error: ApiError) -> bytes:
        return b"event: error\ndata: %b\n\n" % error_body(error)

    # Whole

    def encoded(self) -> bytes:
        reason, sequence = self._stop()
        ending = {"stop_reason": reason, "stop_sequence": sequence, "usage": self._usage()}
        return encode(self.head | {"content": [_content(block) for block in self.blocks]} | ending)

    def _stop(self) -> tuple[str, str | None]:
        if self.finish_reason == "stop":
            if self.has_calls:
                return "tool_use", None
            if isinstance(self.stop_reason, str) and self.stop_reason in self.stop_sequences:
                return "stop_sequence", self.stop_reason
        return STOP_REASONS.get(self.finish_reason or "", "end_turn"), None

    def _usage(self) -> dict[str, int]:
        """The prompt's tokens are read from the cache, written to it (as whole blocks), or neither."""
        prompt, read, written = self.usage.prompt_tokens, self.usage.cached_tokens, 0
        if self.block_size is not None:
            written = max(0, prompt // self.block_size * self.block_size - read)
        return {
            "input_tokens": prompt - read - written,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": read,
            "output_tokens": self.usage.completion_tokens,
        }


def _content(block: Block, empty: bool = False) -> dict[str, Any]:
    text = "" if empty else block.text
    if block.kind == REASONING:
        return {"type": "thinking", "thinking": text, "signature": "" if empty else _signature(text)}
    if block.kind == CALL:
        assert block.call is not None
        return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": _input(text)}
    return {"type": "text", "text": text}


def _input(arguments: str) -> Any:
    """An object, whatever the model wrote: what max_tokens has cut is none."""
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return {}
    return found if isinstance(found, dict) else {}


def _signature(thinking: str) -> str:
    """Clients send it back with the thinking. It is not checked: who may prompt a model may make up its thoughts."""
    return hashlib.sha256(thinking.encode("utf-8", "replace")).hexdigest()


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **fields}))
