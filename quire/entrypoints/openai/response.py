"""Builds responses, whole or as server-sent events; shared by completions and chat.

The per-token path encodes only the token's text: the rest of an event is bytes prepared when the request arrived.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.entrypoints.http.errors import ApiError
from quire.entrypoints.http.generation import Batch
from quire.entrypoints.openai.errors import error_body
from quire.entrypoints.openai.logprobs import LogprobFormat
from quire.entrypoints.openai.protocol import GenerationRequest
from quire.metrics.request import RequestMetrics
from quire.metrics.spec_decode import SpecDecodeMetrics

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which clients skip


def event(body: bytes) -> bytes:
    """A server-sent event."""
    return b"data: " + body + b"\n\n"


@dataclass(frozen=True)
class ResponseOptions:
    """What the server's flags change in every response."""

    fingerprint: str | None
    error_body: Callable[[ApiError], bytes] = error_body
    force_usage: bool = False  # in every event of a stream
    prompt_tokens_details: bool = False
    request_metrics: bool = False


@dataclass
class Usage:
    with_prompt_details: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int | None = None  # None: unknown

    @property
    def total(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def shape(self) -> dict[str, Any]:
        reasoning = self.reasoning_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.total,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens} if self.with_prompt_details else None,
            "completion_tokens_details": {"reasoning_tokens": reasoning} if reasoning is not None else None,
        }


def timing(times: RequestMetrics | None, num_tokens: int, drafts: SpecDecodeMetrics | None = None) -> dict[str, Any]:
    """A request's times in milliseconds and its drafts, with vLLM's names; unknown ones are null."""
    decode = times.time_in_decode if times is not None else None
    inference = times.time_in_inference if times is not None else None
    return {
        "time_to_first_token_ms": _ms(times.time_in_prefill) if times is not None else None,
        "generation_time_ms": _ms(decode),
        "queue_time_ms": _ms(times.time_in_queue) if times is not None else None,
        "mean_itl_ms": _ms(decode / (num_tokens - 1)) if decode is not None and num_tokens > 1 else None,
        "tokens_per_second": num_tokens / inference if inference else None,
        "speculative_decoding": None if drafts is None else drafts.to_dict(),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


class ResponseBuilder(ABC):
    """Choices are numbered prompt by prompt, as OpenAI does: n of the first, n of the second, ..."""

    object: str
    chunk_object: str
    text_prefix: bytes  # before the text in an event's JSON
    text_suffix: bytes
    no_text: bytes  # replaces the text where there is none

    def __init__(
        self, id: str, model: str, options: ResponseOptions, request: GenerationRequest, logprobs: LogprobFormat
    ) -> None:
        self.head = {"id": id, "object": self.object, "created": int(time.time()), "model": model}
        self.options = options
        self.n = request.n or 1
        self.logprob_format = logprobs
        self.with_token_ids = bool(request.return_token_ids)
        self.with_prompt_logprobs = request.prompt_logprobs is not None
        self.usage = Usage(options.prompt_tokens_details)
        self._prompt_tokens: dict[int, int] = {}  # by prompt
        self._choice_tokens: dict[int, int] = {}  # by choice, kept for continuous usage
        self._times: RequestMetrics | None = None
        self._drafts: SpecDecodeMetrics | None = None
        self._started: set[int] = set()
        self._finished: set[int] = set()

        wanted = request.stream_options
        self.with_usage = options.force_usage or bool(wanted and wanted.include_usage)
        continuous = options.force_usage or bool(wanted and wanted.continuous_usage_stats)
        self.continuous_usage = self.with_usage and continuous
        head = {**self.head, "object": self.chunk_object, "system_fingerprint": options.fingerprint}
        self._head = b"data: " + encode(head)[:-1]
        self._event_heads: list[bytes] = []
        self._end = b',"usage":null}\n\n' if self.with_usage else b"}\n\n"
        self._event_tail = self.text_suffix + b',"logprobs":null,"finish_reason":null}]' + self._end
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
            if prompt_index not in self._prompt_tokens:
                self._count_prompt(prompt_index, output)
            for completion in output.outputs:
                index = prompt_index * self.n + completion.index
                self.usage.completion_tokens += len(completion.token_ids)
                if index not in self._started:
                    self._start(index, prompt_index, output, parts)
                if self.continuous_usage:
                    self._choice_tokens[index] += len(completion.token_ids)
                if completion.finish_reason is not None:
                    self._finished.add(index)
                    self._times, self._drafts = output.metrics, completion.spec_decode_metrics
                    parts.append(self._full_event(index, completion))
                elif self._text_only:
                    if completion.text:
                        parts += (self._event_heads[index], encode(completion.text), self._event_tail)
                elif completion.token_ids or completion.text:
                    parts.append(self._full_event(index, completion))
        return b"".join(parts)

    def end(self) -> bytes:
        # A request aborted by an administrator ends without a final output.
        parts = [self.last_event(index, "abort", None) for index in sorted(self._started - self._finished)]
        if self.with_usage:
            fields = b',"choices":[],"usage":' + encode(self.usage.shape())
            if (metrics := self._metrics(self._times, self._drafts)) is not None:
                fields += b',"metrics":' + encode(metrics)
            parts.append(self._head + fields + b"}\n\n")
        return b"".join((*parts, DONE))

    def failed(self, error: ApiError) -> bytes:
        return event(self.options.error_body(error)) + DONE

    @property
    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

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
        return b"".join((*parts, event_fields, self._tail(index)))

    def last_event(self, index: int, finish_reason: str, stop_reason: int | str | None) -> bytes:
        """The end of a choice, without a token."""
        choice_fields = b',"stop_reason":' + encode(stop_reason)
        return self.event(index, self.no_text, finish=encode(finish_reason), choice_fields=choice_fields)

    def text(self, text: str) -> bytes:
        return self.text_prefix + encode(text) + self.text_suffix

    def _full_event(self, index: int, completion: CompletionOutput) -> bytes:
        text = self.text(completion.text) if completion.text else self.no_text
        fields = self.token_fields(completion, index) + self.stop_fields(completion)
        finish = encode(completion.finish_reason)
        return self.event(index, text, self.encoded_logprobs(index, completion), finish, fields)

    def encoded_logprobs(self, index: int, completion: CompletionOutput) -> bytes:
        with_logprobs = self.with_logprobs and completion.token_ids
        return encode(self.logprobs(index, completion)) if with_logprobs else b"null"

    def token_fields(self, completion: CompletionOutput, choice: int) -> bytes:
        return b',"token_ids":' + encode(completion.token_ids) if self.with_token_ids else b""

    def stop_fields(self, completion: CompletionOutput) -> bytes:
        return b',"stop_reason":' + encode(completion.stop_reason) if completion.finish_reason is not None else b""

    def _start(self, index: int, prompt_index: int, output: RequestOutput, parts: list[bytes]) -> None:
        self._started.add(index)
        self._choice_tokens[index] = 0
        while len(self._event_heads) <= index:
            self._event_heads.append(self._open(len(self._event_heads)) + self.text_prefix)
        parts += self.first_events(index, prompt_index, output)

    def _open(self, index: int) -> bytes:
        return self._head + b',"choices":[{"index":%d' % index

    def _tail(self, index: int) -> bytes:
        if not self.continuous_usage:
            return self._end
        prompt, generated = self._prompt_tokens[index // self.n], self._choice_tokens[index]
        usage = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
        return b',"usage":' + encode(usage) + b"}\n\n"

    def _metrics(self, times: RequestMetrics | None, drafts: SpecDecodeMetrics | None) -> dict[str, Any] | None:
        """Of one completion only: the times of several overlap."""
        if self.n != 1 or len(self._prompt_tokens) != 1 or not (self.options.request_metrics or drafts is not None):
            return None
        return timing(times if self.options.request_metrics else None, self.usage.completion_tokens, drafts)

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
        drafts = outputs[0].outputs[0].spec_decode_metrics if outputs and outputs[0].outputs else None
        metrics = self._metrics(outputs[0].metrics if outputs else None, drafts)
        return {
            **self.head,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": self.options.fingerprint,
            "usage": self.usage.shape(),
            **self.extras(outputs),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": metrics,
        }

    def _count_prompt(self, prompt_index: int, output: RequestOutput) -> None:
        self._prompt_tokens[prompt_index] = len(output.prompt_token_ids)
        self.usage.prompt_tokens += len(output.prompt_token_ids)
        self.usage.cached_tokens += output.num_cached_tokens or 0
