"""A worked example of an HTTP dialect: POST /generate {"inputs": ..., "parameters": {...}}, whole or as JSON lines, and
errors of its own shape. One file and one registration."""

from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from quire.engine.input_processor import ParsedPrompt
from quire.engine.outputs import RequestOutput
from quire.entrypoints.http import generation
from quire.entrypoints.http.body import ClientDisconnected
from quire.entrypoints.http.context import LONG_TEXT, Job, ServerContext
from quire.entrypoints.http.dialect import Dialect, register_dialect
from quire.entrypoints.http.errors import SERVER, ApiError, as_api_error, bad_request, json_response
from quire.messages.sampling_params import RequestOutputKind, SamplingParams

NAMES = {"max_new_tokens": "max_tokens"}  # of this dialect -> of SamplingParams
JSON_LINES = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-cache")]

T = TypeVar("T")
Outputs = AsyncGenerator[generation.Batch, None]


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_new_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: list[str] = []


class GenerateRequest(msgspec.Struct):
    inputs: str
    parameters: Parameters = Parameters()
    stream: bool = False


def error_shape(error: ApiError) -> dict[str, Any]:
    return {"error": error.message, "error_type": error.code or error.type}


def error_body(error: ApiError) -> bytes:
    return msgspec.json.encode(error_shape(error))


class GenerateEndpoint:
    """The server has checked the key and the connection's limits before, and encodes what is raised by error_body."""

    def __init__(self, context: ServerContext) -> None:
        self.context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = self.context
        request, _ = await context.bodies.read(scope, receive, GenerateRequest)
        params = self.params(request)
        context.check_chars(len(request.inputs), "inputs")
        context.admit()
        with context.job("gen-", scope.get("quire.client_request_id"), num_prompts=1, num_sequences=1) as job:
            prompt = await self.prompt(request, scope)
            outputs = generation.outputs(context.engine, job, [prompt], params, priority=0)
            if request.stream:
                await self.stream(outputs, job, scope, receive, send)
            else:
                final = await self.while_connected(self.final(outputs), job, receive)
                await json_response(shape(final))(scope, receive, send)

    def params(self, request: GenerateRequest) -> SamplingParams:
        given = {NAMES.get(name, name): value for name, value in msgspec.structs.asdict(request.parameters).items()}
        kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
        try:
            return SamplingParams(**given, output_kind=kind)
        except ValueError as error:
            raise bad_request(f"parameters: {error}", "parameters") from None

    async def prompt(self, request: GenerateRequest, scope: Scope) -> ParsedPrompt:
        encode = self.context.tokenizer.encode
        # What takes long would stall every other stream.
        ids = await self.context.in_thread_if(len(request.inputs) > LONG_TEXT, lambda: encode(request.inputs))
        return ParsedPrompt(request.inputs, ids, self.context.cache_salt(scope, None))

    async def while_connected(self, work: Coroutine[Any, Any, T], job: Job, receive: Receive) -> T:
        """Cancelled if the client disconnects, the deadline passes or the server ends."""
        return await generation.while_connected(work, receive, job, self.context.config.request_timeout)

    async def checked(self, outputs: Outputs) -> AsyncGenerator[RequestOutput, None]:
        async with aclosing(outputs):  # closing an unfinished one aborts its request
            try:
                async for batch in outputs:
                    generation.check_outputs(batch)
                    yield batch[0][1]
            except ValueError as error:  # the engine refused it
                raise bad_request(f"inputs: {error}", "inputs") from None

    async def final(self, outputs: Outputs) -> RequestOutput:
        found = [output async for output in self.checked(outputs)]
        if not found:
            raise ApiError(503, "the request was aborted", type=SERVER, code="aborted")
        return found[-1]

    async def stream(self, outputs: Outputs, job: Job, scope: Scope, receive: Receive, send: Send) -> None:
        started, last = False, b""

        async def lines() -> None:
            nonlocal started
            async with aclosing(self.checked(outputs)) as checked:
                async for output in checked:
                    if not started:
                        await send({"type": "http.response.start", "status": 200, "headers": JSON_LINES})
                        started = True
                    await send({"type": "http.response.body", "body": line(shape(output)), "more_body": True})

        try:
            await self.while_connected(lines(), job, receive)
        except ClientDisconnected:
            raise
        except Exception as error:
            if not started:
                raise  # a response of its own, with the error's status
            last = line(error_shape(as_api_error(error, scope)))
        await send({"type": "http.response.body", "body": last, "more_body": False})


def shape(output: RequestOutput) -> dict[str, Any]:
    (completion,) = output.outputs
    return {"generated_text": completion.text, "finish_reason": completion.finish_reason}


def line(shape: dict[str, Any]) -> bytes:
    return msgspec.json.encode(shape) + b"\n"


def routes(context: ServerContext) -> list[Route]:
    return [Route("/generate", GenerateEndpoint(context), methods=["POST"])]


def example(url: str, name: str) -> str:
    return f"""curl {url}/generate -H 'Content-Type: application/json' -d '{{"inputs": "Hello"}}'"""


GENERATE = Dialect("generate", routes, error_body, prefixes=("/generate",), example=example)


def register() -> None:
    """The registration; a plugin's entry point, in the group quire.general_plugins, names this function."""
    register_dialect(GENERATE)
