"""The gRPC service: the same keys, limits and admission as over HTTP."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, nullcontext
from typing import Any, NoReturn

import grpc

from quire import __version__
from quire.engine.async_engine import EngineDeadError, EngineStalledError
from quire.entrypoints.grpc import engine_pb2 as pb
from quire.entrypoints.grpc.request import GrpcEndpoint, GrpcRequest, MessagesOf
from quire.entrypoints.http import generation
from quire.entrypoints.http.body import SMALL_BODY
from quire.entrypoints.http.context import ServerContext
from quire.entrypoints.http.errors import ApiError, as_api_error, bad_request, overloaded
from quire.entrypoints.http.keys import KnownKeys
from quire.entrypoints.http.rate_limit import limit_client
from quire.entrypoints.openai.params import ParamsBuilder

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
SERVICE = "quire.grpc.engine.QuireEngine"
HEALTH = "grpc.health.v1.Health"
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"  # HealthCheckResponse: its status, field 1
WATCH_SECONDS = 1.0
MAX_WATCHES = 256  # they need no key, and must not take the places of calls

Call = Any  # grpc.aio.ServicerContext


class EngineService:
    """Its handlers take requests as streams of undecoded messages, so that they choose when one is read: not before the
    key is known, and only so many at a time as may be as large as `--max-request-bytes` allows."""

    def __init__(self, context: ServerContext) -> None:
        self.context = context
        config = context.config
        params = ParamsBuilder(config, context.engine.max_model_len, context.engine_config.model)
        self.endpoint = GrpcEndpoint(context, params)
        self._reading = asyncio.Semaphore(max(1, config.max_request_bytes_in_all // config.max_request_bytes))
        self._decoding = asyncio.Lock()  # decoded messages may take several times their size

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        single = grpc.stream_unary_rpc_method_handler
        methods = {
            "Generate": grpc.stream_stream_rpc_method_handler(
                self.generate, response_serializer=pb.GenerateResponse.SerializeToString
            ),
            "HealthCheck": single(self.health, response_serializer=pb.HealthCheckResponse.SerializeToString),
            "GetModelInfo": single(self.model_info, response_serializer=pb.GetModelInfoResponse.SerializeToString),
        }
        return [grpc.method_handlers_generic_handler(SERVICE, methods), health_handler(self.problem)]

    async def generate(self, messages: AsyncIterator[bytes], call: Call) -> AsyncIterator[Any]:
        scope: dict[str, Any] = {"type": "grpc", "headers": [], "client": (_address(call.peer()), 0)}
        scope["quire.request_id"] = uuid.uuid4().hex
        try:
            await self._check_key(call, scope)
            given, size = await self._read(messages)
            async with (
                asyncio.timeout(self.context.config.request_timeout),
                self.endpoint.running(given, size, scope) as run,
                aclosing(run.outputs) as outputs,
            ):
                assert isinstance(run.answer, MessagesOf)
                batch = await self.endpoint.first(outputs)
                while batch:
                    generation.check_outputs(batch)
                    for _, output in batch:
                        for message in run.answer.messages(output):
                            yield message
                    batch = await anext(outputs, [])
        except TimeoutError:
            seconds = self.context.config.request_timeout
            await _abort(call, ApiError(504, f"the request took more than {seconds:g} seconds", code="timeout"))
        except (asyncio.CancelledError, GeneratorExit):  # by the client, its deadline, or the server's end
            raise
        except Exception as error:
            await _abort(call, as_api_error(error, scope))

    async def _read(self, messages: AsyncIterator[bytes]) -> tuple[GrpcRequest, int]:
        """The request, and its size in bytes."""
        seconds = self.context.config.timeout_request_body
        async with self._reading:
            try:
                data = await asyncio.wait_for(anext(messages, None), seconds)
            except TimeoutError:
                message = f"the message did not arrive within {seconds:g} seconds (--timeout-request-body)"
                raise ApiError(408, message, code="timeout") from None
            if data is None:
                raise bad_request("the call has no message")
            large = len(data) > SMALL_BODY
            async with self._decoding if large else nullcontext():
                return await self.context.in_thread_if(large, lambda: self.endpoint.decoded(data)), len(data)

    async def _check_key(self, call: Call, scope: dict[str, Any]) -> None:
        if self.context.keys is not None:
            scope["quire.key"] = check_key(self.context.keys, call.invocation_metadata())
        if self.context.limiter is not None:
            await limit_client(self.context.limiter, scope)

    async def health(self, messages: AsyncIterator[bytes], call: Call) -> Any:
        message = await self.problem()
        return pb.HealthCheckResponse(healthy=message is None, message=message or "")

    async def model_info(self, messages: AsyncIterator[bytes], call: Call) -> Any:
        try:
            await self._check_key(call, {"client": (_address(call.peer()), 0)})
        except ApiError as error:
            await _abort(call, error)
        return pb.GetModelInfoResponse(
            served_names=self.context.shown_names,
            max_model_len=self.context.engine.max_model_len,
            vocab_size=self.context.engine_config.model.vocab_size,
            version=__version__,
        )

    async def problem(self) -> str | None:
        """Why requests are not served; None if they are."""
        if self.context.draining:
            return "the server is shutting down"
        try:
            await self.context.engine.check_health()
        except (EngineDeadError, EngineStalledError) as error:
            return str(error)
        return None


def check_key(keys: KnownKeys, metadata: Iterable[tuple[str, Any]] | None) -> bytes:
    sent = {key: value for key, value in metadata or () if isinstance(value, str)}
    return keys.check(sent.get("authorization", ""), sent.get("x-api-key", ""))


def health_handler(problem: Callable[[], Awaitable[str | None]]) -> grpc.GenericRpcHandler:
    """The standard health service, for every service name. Its messages are encoded here: a second copy of their
    definition would clash with grpcio-health-checking's in a process that has both."""

    async def check(messages: AsyncIterator[bytes], call: Call) -> bytes:
        return SERVING if await problem() is None else NOT_SERVING

    watching: set[Call] = set()

    async def watch(messages: AsyncIterator[bytes], call: Call) -> AsyncIterator[bytes]:
        if len(watching) >= MAX_WATCHES:
            await _abort(call, overloaded(f"{MAX_WATCHES} clients are watching already", 5))
        watching.add(call)
        last = b""
        try:
            while True:
                status = await check(messages, call)
                if status != last:
                    yield status
                last = status
                await asyncio.sleep(WATCH_SECONDS)
        finally:
            watching.discard(call)

    # As if requests were streams, which are left unread.
    methods = {
        "Check": grpc.stream_unary_rpc_method_handler(check),
        "Watch": grpc.stream_stream_rpc_method_handler(watch),
    }
    return grpc.method_handlers_generic_handler(HEALTH, methods)


async def _abort(call: Call, error: ApiError) -> NoReturn:
    default = grpc.StatusCode.INTERNAL if error.status >= 500 else grpc.StatusCode.INVALID_ARGUMENT
    await call.abort(CODES.get(error.status, default), error.message)
    raise AssertionError("abort() raises")


def _address(peer: str) -> str:
    """ipv4:1.2.3.4:567 and ipv6:%5B::1%5D:567 without the port: who it is, for rate limits."""
    return peer.rpartition(":")[0]
