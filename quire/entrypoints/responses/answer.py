"""Responses and their streams of events."""

import time
import uuid
from typing import Any

import msgspec

from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.entrypoints.http.errors import ApiError
from quire.entrypoints.openai.blocks import CALL, REASONING, Block, BlockAnswer
from quire.entrypoints.openai.logprobs import LogprobFormat
from quire.entrypoints.openai.output_parsing import OutputParsing
from quire.entrypoints.openai.response import encode
from quire.entrypoints.responses.protocol import ResponsesRequest
from quire.entrypoints.responses.request import ResponsesChat

QUEUED, RUNNING, COMPLETED, INCOMPLETE, FAILED, CANCELLED = (
    "queued",
    "in_progress",
    "completed",
    "incomplete",
    "failed",
    "cancelled",
)
PREFIXES = {REASONING: "rs_", CALL: "fc_"}  # of items' ids


class ResponsesAnswer(BlockAnswer):
    """A block is an output item."""

    def __init__(
        self,
        id: str,
        model: str,
        request: ResponsesChat,
        logprobs: LogprobFormat,
        parsing: OutputParsing | None,
        defaults: dict[str, Any],
    ) -> None:
        super().__init__(parsing, request.include_reasoning is not False)
        self.id = id
        self.request = request
        self.logprob_format = logprobs
        self.status = QUEUED if request.source.background else RUNNING
        self.error: dict[str, Any] | None = None
        self.stored = request.source.store is not False
        self._sequence = 0
        self._prompt: dict[str, Any] | None = None  # with enable_response_messages
        self._raw = {"message": "", "tokens": [], "type": "raw_message_tokens"}
        self._head = _head(id, model, request, defaults)
        self._completed_at: int | None = None

    # Events

    def start(self, output: RequestOutput) -> bytes:
        self.status = RUNNING
        if self.request.source.enable_response_messages:
            tokens = list(output.prompt_token_ids)
            self._prompt = {"message": output.prompt or "", "tokens": tokens, "type": "raw_message_tokens"}
        return self.created() + self.event("response.in_progress", response=self.shape())

    def created(self) -> bytes:
        """The first event, if it was not sent before."""
        return self.event("response.created", response=self.shape()) if self._sequence == 0 else b""

    def queued(self) -> bytes:
        return self.created() + self.event("response.queued", response=self.shape())

    def opened(self, block: Block) -> bytes:
        block.state["id"] = PREFIXES.get(block.kind, "msg_") + uuid.uuid4().hex
        added = self.event("response.output_item.added", output_index=block.index, item=_item(block, started=False))
        if block.kind == CALL:
            return added
        return added + self._of_block("response.content_part.added", block, part=_part(block, ""))

    def extended(self, block: Block, text: str, logprobs: list[Any]) -> bytes:
        if block.kind == CALL:
            return self._of_block("response.function_call_arguments.delta", block, delta=text)
        if block.kind == REASONING:
            return self._of_block("response.reasoning_text.delta", block, delta=text)
        return self._of_block("response.output_text.delta", block, delta=text, logprobs=logprobs)

    def closed(self, block: Block) -> bytes:
        if block.kind == CALL:
            assert block.call is not None
            name = block.call.name
            done = self._of_block("response.function_call_arguments.done", block, name=name, arguments=block.text)
        elif block.kind == REASONING:
            done = self._of_block("response.reasoning_text.done", block, text=block.text)
        else:
            done = self._of_block("response.output_text.done", block, text=block.text, logprobs=block.logprobs)
        if block.kind != CALL:
            done += self._of_block("response.content_part.done", block, part=_part(block, block.text))
        if self.finish_reason not in (None, "stop") and block is self.blocks[-1]:
            block.state["status"] = INCOMPLETE
        return done + self.event("response.output_item.done", output_index=block.index, item=_item(block))

    def last_events(self) -> bytes:
        if self.finish_reason == "abort":
            return self._fail("server_error", "the request was aborted")
        self.status = INCOMPLETE if self.finish_reason == "length" else COMPLETED
        self._completed_at = int(time.time()) if self.status == COMPLETED else None
        return self.event(f"response.{self.status}", response=self.shape())

    def failed(self, error: ApiError) -> bytes:
        code = "rate_limit_exceeded" if error.status == 429 else error.code or "server_error"
        return self.created() + self._fail(code, error.message)

    def _fail(self, code: str, message: str) -> bytes:
        self.status, self.error = FAILED, {"code": code, "message": message}
        return self.event("response.failed", response=self.shape())

    def event(self, kind: str, **fields: Any) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        data = encode({"type": kind, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def _of_block(self, kind: str, block: Block, **fields: Any) -> bytes:
        place: dict[str, Any] = {"item_id": block.state["id"], "output_index": block.index}
        if block.kind != CALL:
            place["content_index"] = 0
        return self.event(kind, **place, **fields)

    # Both

    def token_logprobs(self, completion: CompletionOutput) -> list[Any]:
        if self._prompt is not None:
            self._raw["message"] += completion.text  # type: ignore[operator]
            self._raw["tokens"] += completion.token_ids  # type: ignore[operator]
        if not self.request.logprobs:
            return []
        found = completion.logprobs or []
        return self.logprob_format.chat(completion.token_ids, found, self.request.top_logprobs or 0)

    def items(self) -> list[dict[str, Any]]:
        return [_item(block) for block in self.blocks if not block.open]

    def shape(self) -> dict[str, Any]:
        ended = self.status in (COMPLETED, INCOMPLETE)
        return {
            **self._head,
            "status": self.status,
            "completed_at": self._completed_at,
            "error": self.error,
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == INCOMPLETE else None,
            "output": self.items() if ended or self.status == FAILED else [],
            "store": self.stored,
            "usage": self._usage() if ended else None,
            **(
                {"input_messages": [self._prompt], "output_messages": [self._raw]}
                if self._prompt is not None and ended
                else {}
            ),
        }

    def encoded(self) -> bytes:
        return encode(self.shape())

    def _usage(self) -> dict[str, Any]:
        usage = self.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
            "total_tokens": usage.total,
        }


def _head(id: str, model: str, request: ResponsesChat, defaults: dict[str, Any]) -> dict[str, Any]:
    """What is the same in all snapshots of a response."""
    source: ResponsesRequest = request.source
    reasoning, text = source.reasoning, source.text
    tools = [{"description": None, "parameters": None, "strict": None, **tool} for tool in source.tools or ()]
    return {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "background": bool(source.background),
        "instructions": source.instructions,
        "max_output_tokens": source.max_output_tokens,
        "max_tool_calls": source.max_tool_calls,
        "metadata": source.metadata or {},
        "model": model,
        "parallel_tool_calls": source.parallel_tool_calls is not False,
        "previous_response_id": source.previous_response_id,
        "prompt": None,
        "prompt_cache_key": source.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.effort if reasoning is not None else None,
            "summary": reasoning.summary if reasoning is not None else None,
        },
        "safety_identifier": source.safety_identifier,
        "service_tier": source.service_tier or "auto",
        "temperature": defaults.get("temperature", 1.0) if source.temperature is None else source.temperature,
        "text": {
            "format": (text.format if text is not None else None) or {"type": "text"},
            "verbosity": text.verbosity if text is not None else None,
        },
        "tool_choice": source.tool_choice or "auto",
        "tools": tools,
        "top_logprobs": source.top_logprobs or 0,
        "top_p": defaults.get("top_p", 1.0) if source.top_p is None else source.top_p,
        "truncation": source.truncation or "disabled",
        "user": source.user,
    }


def _part(block: Block, text: str) -> dict[str, Any]:
    if block.kind == REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": block.logprobs if text else []}


def _item(block: Block, started: bool = True) -> dict[str, Any]:
    """`started`: it has content."""
    status = block.state.get("status", COMPLETED) if started else RUNNING
    if block.kind == CALL:
        assert block.call is not None
        return {
            "type": "function_call",
            "id": block.state["id"],
            "call_id": block.call.id,
            "name": block.call.name,
            "arguments": block.text if started else "",
            "status": status,
        }
    content = [_part(block, block.text)] if started else []
    if block.kind == REASONING:
        shape = {"type": "reasoning", "id": block.state["id"], "summary": [], "content": content}
        return shape | {"encrypted_content": None, "status": status}
    return {"type": "message", "id": block.state["id"], "role": "assistant", "content": content, "status": status}


def with_status(response: bytes, status: str) -> bytes:
    """A stored response, with another status."""
    shape: dict[str, Any] = msgspec.json.decode(response)
    return encode(shape | {"status": status})
