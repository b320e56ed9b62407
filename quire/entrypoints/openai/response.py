"""Builds responses, whole or as server-sent events; shared by completions and chat.

The per-token path encodes only the token's text: the rest of an event is bytes prepared when the request arrived.
"""

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.entrypoints.http.generation import Batch
from quire.entrypoints.openai.logprobs import LogprobFormat
from quire.entrypoints.openai.protocol import GenerationRequest

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def event(body: bytes) -> bytes:
    """A server-sent event."""
    return b"data: " + body + b"\n\n"


@dataclass
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int | None = None  # None: unknown

    @property
    def total(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def shape(self) -> dict[str, Any]:
        shape: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.total,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            shape["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return shape


class ResponseBuilder(ABC):
    """Choices are numbered prompt by prompt, as OpenAI does: n of the first, n of the second, ..."""

    object: str
    chunk_object: str
    text_prefix: bytes  # before the text in an event's JSON
    text_suffix: bytes
    no_text: bytes  # replaces the text in the last event of a choice

    def __init__(
        self, id: str, model: str, fingerprint: str, request: GenerationRequest, logprobs: LogprobFormat
    ) -> None:
        self.head = {"id": id, "object": self.object, "created": int(time.time()), "model": model}
        self.fingerprint = fingerprint
        self.n = request.n or 1
        self.logprob_format = logprobs
        self.with_token_ids = bool(request.return_token_ids)
        self.with_prompt_logprobs = request.prompt_logprobs is not None
        self.usage = Usage()
        self._prompts_seen: set[int] = set()
        self._started: set[int] = set()
        self._finished: set[int] = set()

        options = request.stream_options
        self.with_usage = bool(options and options.include_usage)
        self.continuous_usage = bool(self.with_usage and options and options.continuous_usage_stats)
        head = {**self.head, "object": self.chunk_object, "system_fingerprint": fingerprint}
        self._head = b"data: " + encode(head)[:-1]
        self._event_heads: list[bytes] = []
        self._event_tail = self.text_suffix + b',"logprobs":null,"finish_reason":null}]' + self._tail()
        self._text_only = not (self.with_logprobs or self.with_token_ids or self.continuous_usage)

    # Endpoint-specific

    @property
    @abstractmethod
    def with_logprobs(self) -> bool: ...

    @abstractmethod
    def first_events(self, choice: int, prompt_index: int, output: RequestOutput) -> list[bytes]:
        """Events before the first text of a choice."""

    @abstractmethod
    def choice(
        self, index: int, prompt_index: int, output: RequestOutput, completion: CompletionOutput
    ) -> dict[str, Any]:
        """One choice of a whole response."""

    @abstractmethod
    def logprobs(self, choice: int, completion: CompletionOutput) -> Any: ...

    def extras(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Fields of a whole response beside its choices."""
        return {}

    # Streams

    def events(self, batch: Batch) -> bytes:
        parts: list[bytes] = []
        for prompt_index, output in batch:
            if prompt_index not in self._prompts_seen:
                self._count_prompt(prompt_index, output)
            for completion in output.outputs:
                index = prompt_index * self.n + completion.index
                self.usage.completion_tokens += len(completion.token_ids)
                if index not in self._started:
                    self._start(index, prompt_index, output, parts)
                if self._text_only:
                    if completion.text:
                        parts += (self._event_heads[index], encode(completion.text), self._event_tail)
                elif completion.token_ids or completion.text:
                    parts.append(self._full_event(index, completion))
                if completion.finish_reason is not None:
                    self._finished.add(index)
                    parts.append(self.last_event(index, completion.finish_reason, completion.stop_reason))
        return b"".join(parts)

    def end(self) -> bytes:
        # A request aborted by an administrator ends without a final output.
        parts = [self.last_event(index, "abort", None) for index in sorted(self._started - self._finished)]
        if self.with_usage:
            parts.append(self._head + b',"choices":[],"usage":' + encode(self.usage.shape()) + b"}\n\n")
        return b"".join((*parts, DONE))

    def event(
        self,
        index: int,
        content: bytes,
        logprobs: bytes = b"null",
        finish: bytes = b"null",
        choice_fields: bytes = b"",
        event_fields: bytes = b"",
    ) -> bytes:
        """`choice_fields` are fields of the choice, `event_fields` fields of the event."""
        parts = (
            self._open(index),
            content,
            b',"logprobs":',
            logprobs,
            b',"finish_reason":',
            finish,
            choice_fields,
            b"}]",
        )
        return b"".join((*parts, event_fields, self._tail()))

    def last_event(self, index: int, finish_reason: str, stop_reason: int | str | None) -> bytes:
        choice_fields = b',"stop_reason":' + encode(stop_reason)
        return self.event(index, self.no_text, finish=encode(finish_reason), choice_fields=choice_fields)

    def text(self, text: str) -> bytes:
        return self.text_prefix + encode(text) + self.text_suffix

    def _full_event(self, index: int, completion: CompletionOutput) -> bytes:
        choice_fields = b',"token_ids":' + encode(completion.token_ids) if self.with_token_ids else b""
        logprobs = encode(self.logprobs(index, completion)) if self.with_logprobs else b"null"
        return self.event(index, self.text(completion.text), logprobs, choice_fields=choice_fields)

    def _start(self, index: int, prompt_index: int, output: RequestOutput, parts: list[bytes]) -> None:
        self._started.add(index)
        while len(self._event_heads) <= index:
            self._event_heads.append(self._open(len(self._event_heads)) + self.text_prefix)
        parts += self.first_events(index, prompt_index, output)

    def _open(self, index: int) -> bytes:
        return self._head + b',"choices":[{"index":%d' % index

    def _tail(self) -> bytes:
        if self.continuous_usage:
            return b',"usage":' + encode(self.usage.shape()) + b"}\n\n"
        return b',"usage":null}\n\n' if self.with_usage else b"}\n\n"

    # Whole responses

    def body(self, outputs: list[RequestOutput]) -> bytes:
        """A whole response, encoded choice by choice: one call would hold the GIL throughout a large one."""
        shape = self.whole(outputs)
        choices = b",".join([encode(choice) for choice in shape["choices"]])
        before, after = encode(shape | {"choices": None}).split(b'"choices":null', 1)
        return b"".join((before, b'"choices":[', choices, b"]", after))

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        choices = []
        for prompt_index, output in enumerate(outputs):
            self._count_prompt(prompt_index, output)
            for completion in sorted(output.outputs, key=lambda one: one.index):
                self.usage.completion_tokens += len(completion.token_ids)
                choices.append(self.choice(prompt_index * self.n + completion.index, prompt_index, output, completion))
        usage = self.usage.shape()
        head = {**self.head, "system_fingerprint": self.fingerprint}
        return {**head, "choices": choices, "usage": usage, **self.extras(outputs)}

    def _count_prompt(self, prompt_index: int, output: RequestOutput) -> None:
        self._prompts_seen.add(prompt_index)
        self.usage.prompt_tokens += len(output.prompt_token_ids)
        self.usage.cached_tokens += output.num_cached_tokens or 0
