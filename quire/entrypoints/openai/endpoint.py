"""A generation request, from its body to the last byte of the response; shared by all routes that generate."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.engine.input_processor import ParsedPrompt
from quire.engine.outputs import RequestOutput
from quire.entrypoints.http import generation
from quire.entrypoints.http.body import ClientDisconnected
from quire.entrypoints.http.context import LONG_TEXT, Job, ServerContext
from quire.entrypoints.http.errors import (
    SERVER,
    ApiError,
    as_api_error,
    bad_request,
)
from quire.entrypoints.http.generation import Batch
from quire.entrypoints.http.load_report import load_report
from quire.entrypoints.openai import beam
from quire.entrypoints.openai.beam import BeamRequest
from quire.entrypoints.openai.errors import ERROR_BODIES, refused_value
from quire.entrypoints.openai.logprobs import LogprobFormat
from quire.entrypoints.openai.params import ParamsBuilder
from quire.entrypoints.openai.protocol import EngineRequest, GenerationRequest
from quire.entrypoints.openai.response import ResponseOptions, Usage
from quire.messages.sampling_params import ALL_LOGPROBS, SamplingParams

LARGE_RESPONSE = 10_000  # logprobs; encoding them on the event loop would stall every stream
EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

R = TypeVar("R", bound=EngineRequest)
T = TypeVar("T")


class Answer(Protocol):
    """What a dialect makes of a request's outputs: server-sent events, or one body."""

    usage: Usage

    @property
    def keep_alive(self) -> bytes:
        """Sent where there is nothing to send for long."""
        ...

    def events(self, batch: Batch) -> bytes: ...

    def end(self) -> bytes:
        """The events after the last output."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """The events that end a stream with an error."""
        ...

    def body(self, outputs: list[RequestOutput]) -> bytes:
        """A whole response."""
        ...


@dataclass
class Run(Generic[R]):
    """An admitted request that generates."""

    request: R
    job: Job
    outputs: AsyncGenerator[Batch, None]
    num_prompts: int
    answer: Answer
    large: bool  # encoding its response would stall the event loop


class GenerationEndpoint(ABC, Generic[R]):
    request_type: type[R]
    id_prefix: str
    prompt_field: str

    def __init__(self, context: ServerContext, params: ParamsBuilder) -> None:
        self.context = context
        self.builder = params
        config = context.config
        self.options = ResponseOptions(
            context.fingerprint,
            ERROR_BODIES[config.error_format],
            config.enable_force_include_usage,
            config.enable_prompt_tokens_details,
            config.enable_per_request_metrics,
        )

    @abstractmethod
    def params(self, request: R) -> SamplingParams: ...

    @abstractmethod
    def sources(self, request: R) -> Sequence[Any]:
        """The unprocessed prompts: strings, token ids or conversations."""

    @abstractmethod
    def prompts(self, request: R, sources: Sequence[Any], size: int) -> list[ParsedPrompt]:
        """`size` is the body's, in bytes."""

    def rendered(self, request: R, sources: Sequence[Any], size: int) -> list[ParsedPrompt]:
        """The prompts as /render needs them."""
        return self.prompts(request, sources, size)

    def adjusted(self, request: R, params: SamplingParams, prompts: list[ParsedPrompt]) -> SamplingParams:
        """Parameters that depend on the prompts."""
        return params

    @abstractmethod
    def response(self, id: str, model: str, request: R, logprobs: LogprobFormat) -> Answer: ...

    async def finished(self, run: Run[R], scope: Scope) -> None:
        """Called when the answer is complete, before the client sees its end."""

    async def read(self, scope: Scope, receive: Receive) -> tuple[R, int]:
        """The request, and its body's size in bytes."""
        return await self.context.bodies.read(scope, receive, self.request_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, size = await self.read(scope, receive)
        await self.respond(request, size, scope, receive, send)

    async def respond(self, request: R, size: int, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.running(request, size, scope) as run:
            if request.stream:
                await self._stream(run, scope, receive, send)
                return
            collected = self._collect(run.outputs, run.num_prompts)
            finals = await self._while_connected(collected, receive, run.job)
            body = await self.context.in_thread_if(run.large, lambda: run.answer.body(finals))
            await self.finished(run, scope)
            headers = load_report(scope, self.context.engine.stats)
            await Response(body, headers=headers, media_type="application/json")(scope, receive, send)

    @asynccontextmanager
    async def running(self, request: R, size: int, scope: Scope) -> AsyncIterator[Run[R]]:
        """Admits the request and prepares its outputs; what it has used is charged in the end."""
        context = self.context
        model = context.check_model(request.model)
        context.admit()

        def prepare() -> tuple[BeamRequest | None, SamplingParams, Sequence[Any]]:
            search = self._search(request)
            params = self.params(request) if search is None else search.params
            return search, params, self.sources(request)

        def tokenize() -> tuple[list[ParsedPrompt], SamplingParams]:
            prompts = self.prompts(request, sources, size)
            return prompts, self.adjusted(request, params, prompts)

        search, params, sources = await context.in_thread_if(size > LONG_TEXT, prepare)
        num_sequences = len(sources) * (params.n if search is None else search.beams.beam_width)
        request_id = self.request_id(request, scope)
        await self.admit(num_sequences, scope)
        with context.job(self.id_prefix, request_id, len(sources), num_sequences) as job:
            prompts, params = await context.in_thread_if(self.takes_long(request, size), tokenize)
            large = self._check_logprobs(request, prompts, params) > LARGE_RESPONSE
            for prompt in prompts:
                prompt.cache_salt = context.cache_salt(scope, request.cache_salt)
                prompt.lora = context.adapter(model)
            context.admit_tokens(job, prompts)
            logprobs = LogprobFormat(context.engine.tokenizer, self.as_token_ids(request))
            answer = self.response(job.id, model, request, logprobs)
            priority = request.priority or 0
            if search is not None:
                outputs = beam.outputs(context, job, prompts, search, params, priority)
            else:
                outputs = generation.outputs(context.engine, job, prompts, params, priority)
            if job.queued_tokens:
                outputs = generation.until_first(outputs, job)
            if context.request_log is not None:
                context.request_log.received(job.engine_ids(), prompts, params)
                if context.request_log.outputs:
                    outputs = context.request_log.logged(outputs, job.engine_ids(), bool(request.stream))
            if context.tracer is not None:
                outputs = context.tracer.traced(outputs, job.engine_ids(), params, Headers(scope=scope))
            try:
                yield Run(request, job, outputs, len(prompts), answer, large)
            finally:
                charge = scope.get("quire.charge")
                if charge is not None:
                    charge(answer.usage.total)

    def takes_long(self, request: R, size: int) -> bool:
        """Whether rendering and tokenizing would stall the event loop."""
        return size > LONG_TEXT

    def as_token_ids(self, request: R) -> bool:
        """Whether logprobs name tokens by their ids."""
        given = request.return_tokens_as_token_ids if isinstance(request, GenerationRequest) else None
        return self.context.config.return_tokens_as_token_ids if given is None else given

    def _search(self, request: R) -> BeamRequest | None:
        if isinstance(request, GenerationRequest) and request.use_beam_search:
            return beam.beam_request(request, self.context, self.builder)
        return None

    async def admit(self, num_sequences: int, scope: Scope) -> None:
        """Enforce limits on the number of sequences, before anything is tokenized."""
        await self.context.admit_sequences(num_sequences, scope, self.context.config.max_sequences)

    def _check_logprobs(self, request: R, prompts: Sequence[ParsedPrompt], params: SamplingParams) -> int:
        """The most logprobs the response may hold. A single sequence is not limited: its tokens arrive over time."""
        vocab, longest = self.builder.vocab_size, self.context.engine.max_model_len
        per_prompt, per_output = (
            0 if count is None else 1 + (vocab if count == ALL_LOGPROBS else count)
            for count in (params.prompt_logprobs, params.num_logprobs)
        )
        of_prompts = sum(len(prompt.token_ids) for prompt in prompts) * per_prompt * self.prompt_copies(request, params)
        of_outputs = len(prompts) * params.n * min(params.max_tokens or longest, longest) * per_output
        count = of_prompts + (of_outputs if len(prompts) * params.n > 1 else 0)
        most = self.builder.max_logprob_entries
        if count > most:
            message = f"the response may hold {count} logprobs; at most {most} are allowed (--max-logprob-entries)"
            raise bad_request(message, "logprobs", "too_many_logprobs")
        return of_prompts + of_outputs

    def prompt_copies(self, request: R, params: SamplingParams) -> int:
        """How often the response repeats a prompt's logprobs."""
        return 1

    async def _while_connected(self, work: Coroutine[Any, Any, T], receive: Receive, job: Job) -> T:
        return await generation.while_connected(work, receive, job, self.context.config.request_timeout)

    async def first(self, outputs: AsyncGenerator[Batch, None]) -> Batch:
        """The engine validates before its first output, so only this await can raise ValueError."""
        try:
            return await anext(outputs, None) or []  # a tuple as the default trips up CPython 3.11
        except ValueError as error:
            raise refused_value(error, self.request_type.__struct_fields__, self.prompt_field) from None

    async def _collect(self, outputs: AsyncGenerator[Batch, None], count: int) -> list[RequestOutput]:
        finals: dict[int, RequestOutput] = {}
        async with aclosing(outputs):
            batch = await self.first(outputs)
            generation.check_outputs(batch)
            finals.update(batch)
            async for batch in outputs:
                generation.check_outputs(batch)
                finals.update(batch)
        if len(finals) < count:
            raise ApiError(503, "the request was aborted", type=SERVER, code="aborted")
        return [finals[prompt_index] for prompt_index in range(count)]

    async def _stream(self, run: Run[R], scope: Scope, receive: Receive, send: Send) -> None:
        answer, large = run.answer, run.large
        started = quiet = False

        async def start() -> None:
            nonlocal started
            if not started:
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS})

        async def events() -> None:
            nonlocal quiet
            async with aclosing(run.outputs) as outputs:
                batch = await self.first(outputs)
                generation.check_outputs(batch)
                await start()
                data = answer.events(batch) if not large else await self.context.in_thread(answer.events, batch)
                await send({"type": "http.response.body", "body": data, "more_body": True})
                async for batch in outputs:
                    generation.check_outputs(batch)
                    # Per-token path: avoid an extra coroutine.
                    data = answer.events(batch) if not large else await self.context.in_thread(answer.events, batch)
                    if data:
                        quiet = False
                        await send({"type": "http.response.body", "body": data, "more_body": True})

        async def kept_alive(interval: float) -> None:
            """The events, and something for every interval without one, so that proxies do not time out."""
            nonlocal quiet
            task = asyncio.create_task(events())
            try:
                while not (await asyncio.wait({task}, timeout=interval))[0]:
                    if quiet:
                        await start()
                        await send({"type": "http.response.body", "body": answer.keep_alive, "more_body": True})
                    quiet = True
                await task
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

        interval = self.context.config.sse_keep_alive_interval
        try:
            await self._while_connected(kept_alive(interval) if interval else events(), receive, run.job)
            last = answer.end()
            await self.finished(run, scope)
        except ClientDisconnected:
            return
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # also panics of Rust libraries
            if not started:
                raise
            last = answer.failed(as_api_error(error, scope))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def check_length(self, truncated: bool, num_tokens: int, prompt_index: int | None = None) -> None:
        longest = self.context.engine.max_model_len - 1
        if num_tokens > longest and not truncated:
            which = "the prompt" if prompt_index is None else f"prompt[{prompt_index}]"
            message = f"{which} has {num_tokens} tokens; at most {longest} are allowed, plus one generated token"
            raise bad_request(message, self.prompt_field, "context_length_exceeded")

    def request_id(self, request: R, scope: Scope) -> str | None:
        return self.context.request_id(request.request_id, scope)
