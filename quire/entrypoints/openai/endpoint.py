"""What both kinds of generation do with a request, from its body to the last byte of the response."""

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Generic, TypeVar

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
    openai_body,
    refused_value,
)
from quire.entrypoints.http.generation import Batch
from quire.entrypoints.openai import beam
from quire.entrypoints.openai.beam import BeamRequest
from quire.entrypoints.openai.logprobs import LogprobFormat
from quire.entrypoints.openai.params import ParamsBuilder
from quire.entrypoints.openai.protocol import GenerationRequest
from quire.entrypoints.openai.response import DONE, ResponseBuilder, event
from quire.messages.sampling_params import ALL_LOGPROBS, SamplingParams

LARGE_RESPONSE = 10_000  # logprobs; writing them would hold up every other stream
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

R = TypeVar("R", bound=GenerationRequest)
T = TypeVar("T")


class GenerationEndpoint(ABC, Generic[R]):
    request_type: type[R]
    id_prefix: str
    prompt_field: str

    def __init__(self, context: ServerContext, params: ParamsBuilder) -> None:
        self.context = context
        self.builder = params

    @abstractmethod
    def params(self, request: R) -> SamplingParams: ...

    @abstractmethod
    def sources(self, request: R) -> Sequence[Any]:
        """What is to become prompts: texts, token ids or conversations."""

    @abstractmethod
    def prompts(self, request: R, sources: Sequence[Any], size: int) -> list[ParsedPrompt]:
        """`size` is that of the body, in bytes."""

    def adjusted(self, request: R, params: SamplingParams, prompts: list[ParsedPrompt]) -> SamplingParams:
        """What can only be said once the prompts are known."""
        return params

    @abstractmethod
    def response(self, id: str, model: str, request: R, logprobs: LogprobFormat) -> ResponseBuilder: ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = self.context
        request, size = await context.bodies.read(scope, receive, self.request_type)
        model = context.check_model(request.model)
        context.admit()

        def prepared() -> tuple[BeamRequest | None, SamplingParams, Sequence[Any]]:
            search = beam.beam_request(request, context, self.builder) if request.use_beam_search else None
            params = self.params(request) if search is None else search.params
            return search, params, self.sources(request)

        def tokenized() -> tuple[list[ParsedPrompt], SamplingParams]:
            prompts = self.prompts(request, sources, size)
            return prompts, self.adjusted(request, params, prompts)

        search, params, sources = await context.off_loop_if(size > LONG_TEXT, prepared)
        num_sequences = len(sources) * (params.n if search is None else search.beams.beam_width)
        wanted = self._wanted_id(request, scope)
        await self._admit(num_sequences, scope)
        with context.job(self.id_prefix, wanted, len(sources), num_sequences) as job:
            prompts, params = await context.off_loop_if(self.takes_long(request, size), tokenized)
            large = self._check_logprobs(request, prompts, params) > LARGE_RESPONSE
            for prompt in prompts:
                prompt.cache_salt = context.cache_salt(scope, request.cache_salt)
            logprobs = LogprobFormat(context.engine.tokenizer, bool(request.return_tokens_as_token_ids))
            response = self.response(job.id, model, request, logprobs)
            priority = request.priority or 0
            if search is not None:
                outputs = beam.outputs(context, job, prompts, search, params, priority)
            else:
                outputs = generation.outputs(context.engine, job, prompts, params, priority)
            if context.tracer is not None:
                outputs = context.tracer.traced(outputs, job.engine_ids(), params, Headers(scope=scope))
            try:
                if request.stream:
                    await self._stream(outputs, response, large, job, scope, receive, send)
                else:
                    collected = self._collect(outputs, len(prompts))
                    finals = await self._watched(collected, receive, job)
                    body = await context.off_loop_if(large, lambda: response.body(finals))
                    await Response(body, media_type="application/json")(scope, receive, send)
            finally:
                charge = scope.get("quire.charge")
                if charge is not None:
                    charge(response.usage.total)

    def takes_long(self, request: R, size: int) -> bool:
        """Whether making the prompts would hold up every other stream."""
        return size > LONG_TEXT

    async def _admit(self, num_sequences: int, scope: Scope) -> None:
        """Refuses what is too much, before anything is tokenized."""
        most = self.context.config.max_sequences
        if num_sequences > most:
            message = f"prompts times n are {num_sequences} sequences; at most {most} are allowed (--max-sequences)"
            raise bad_request(message, "n", "too_many_sequences")
        if num_sequences > 1 and "quire.take" in scope:
            await scope["quire.take"](num_sequences - 1)
        self.context.admit(num_sequences)

    def _check_logprobs(self, request: R, prompts: Sequence[ParsedPrompt], params: SamplingParams) -> int:
        """How many the response may hold. What a single sequence generates is not limited: it takes its time."""
        vocab, longest = self.builder.vocab_size, self.context.engine.max_model_len
        per_prompt, per_output = (
            0 if asked is None else 1 + (vocab if asked == ALL_LOGPROBS else asked)
            for asked in (params.prompt_logprobs, params.logprobs)
        )
        of_prompts = sum(len(prompt.token_ids) for prompt in prompts) * per_prompt * self.prompt_copies(request, params)
        of_outputs = len(prompts) * params.n * min(params.max_tokens or longest, longest) * per_output
        count = of_prompts + (of_outputs if len(prompts) * params.n > 1 else 0)
        most = self.context.config.max_logprob_entries
        if count > most:
            message = f"the response may hold {count} logprobs; at most {most} are allowed (--max-logprob-entries)"
            raise bad_request(message, "logprobs", "too_many_logprobs")
        return of_prompts + of_outputs

    def prompt_copies(self, request: R, params: SamplingParams) -> int:
        """How often the response shows a prompt's logprobs."""
        return 1

    async def _watched(self, work: Coroutine[Any, Any, T], receive: Receive, job: Job) -> T:
        return await generation.while_connected(work, receive, job, self.context.config.request_timeout)

    async def _first(self, outputs: AsyncGenerator[Batch, None]) -> Batch:
        """Whatever the engine refuses, it refuses before its first output."""
        try:
            return await anext(outputs, None) or []  # a tuple as the default trips up CPython 3.11
        except ValueError as error:
            raise refused_value(error, self.request_type.__struct_fields__, self.prompt_field) from None

    async def _collect(self, outputs: AsyncGenerator[Batch, None], count: int) -> list[RequestOutput]:
        finals: dict[int, RequestOutput] = {}
        async with aclosing(outputs):
            batch = await self._first(outputs)
            generation.check_outputs(batch)
            finals.update(batch)
            async for batch in outputs:
                generation.check_outputs(batch)
                finals.update(batch)
        if len(finals) < count:
            raise ApiError(503, "the request was aborted", type=SERVER, code="aborted")
        return [finals[place] for place in range(count)]

    async def _stream(
        self,
        outputs: AsyncGenerator[Batch, None],
        response: ResponseBuilder,
        large: bool,
        job: Job,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        started = False

        async def events() -> None:
            nonlocal started
            async with aclosing(outputs):
                batch = await self._first(outputs)
                generation.check_outputs(batch)
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS})
                data = response.events(batch) if not large else await self.context.off_loop(response.events, batch)
                await send({"type": "http.response.body", "body": data, "more_body": True})
                async for batch in outputs:
                    generation.check_outputs(batch)
                    # Every token of every stream comes by here: no coroutine for it.
                    data = response.events(batch) if not large else await self.context.off_loop(response.events, batch)
                    if data:
                        await send({"type": "http.response.body", "body": data, "more_body": True})

        try:
            await self._watched(events(), receive, job)
            last = response.end()
        except ClientDisconnected:
            return
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # also a panic of a Rust library
            if not started:
                raise
            last = event(openai_body(as_api_error(error, scope))) + DONE
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def check_length(self, request: R, num_tokens: int, place: int | None = None) -> None:
        longest = self.context.engine.max_model_len - 1
        if num_tokens > longest and request.truncate_prompt_tokens is None:
            which = "the prompt" if place is None else f"prompt[{place}]"
            message = f"{which} has {num_tokens} tokens; the model takes at most {longest} and one more"
            raise bad_request(message, self.prompt_field, "context_length_exceeded")

    def _wanted_id(self, request: R, scope: Scope) -> str | None:
        if request.request_id is None:
            return scope.get("quire.client_request_id")
        if not REQUEST_ID.fullmatch(request.request_id):
            raise bad_request("request_id must be 1 to 128 visible ASCII characters", "request_id")
        return request.request_id
