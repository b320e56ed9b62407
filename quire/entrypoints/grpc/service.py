"""The gRPC service: the same keys, limits and admission as over HTTP."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc

from quire import __version__
from quire.engine.async_engine import EngineDeadError, EngineStalledError
from quire.entrypoints.grpc import engine_pb2 as pb
from quire.entrypoints.grpc.engine_pb2_grpc import QuireEngineServicer
from quire.entrypoints.grpc.request import GrpcEndpoint, MessagesOf, as_request
from quire.entrypoints.http import generation
from quire.entrypoints.http.context import ServerContext
from quire.entrypoints.http.errors import ApiError, as_api_error
from quire.entrypoints.http.rate_limit import limit_client
from quire.entrypoints.openai.params import ParamsBuilder

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
HEALTH = "grpc.health.v1.Health"
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"  # HealthCheckResponse: its status, field 1
WATCH_SECONDS = 1.0

Call = Any  # grpc.aio.ServicerContext


class EngineService(QuireEngineServicer):
    def __init__(self, context: ServerContext) -> None:
        self.context = context
        params = ParamsBuilder(context.config, context.engine.max_model_len, context.engine_config.model)
        self.endpoint = GrpcEndpoint(context, params)

    async def Generate(self, request: Any, call: Call) -> AsyncIterator[Any]:
        scope: dict[str, Any] = {"type": "grpc", "headers": [], "client": (_address(call.peer()), 0)}
        try:
            await self._check_key(call, scope)
            given = as_request(request)
            async with (
                asyncio.timeout(self.context.config.request_timeout),
                self.endpoint.running(given, request.ByteSize(), scope) as run,
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

    async def _check_key(self, call: Call, scope: dict[str, Any]) -> None:
        sent = {key: value for key, value in call.invocation_metadata() or () if isinstance(value, str)}
        if self.context.keys is not None:
            scope["quire.key"] = self.context.keys.check(sent.get("authorization", ""), sent.get("x-api-key", ""))
        if self.context.limiter is not None:
            await limit_client(self.context.limiter, scope)

    async def HealthCheck(self, request: Any, call: Call) -> Any:
        message = await self.problem()
        return pb.HealthCheckResponse(healthy=message is None, message=message or "")

    async def GetModelInfo(self, request: Any, call: Call) -> Any:
        try:
            await self._check_key(call, {"client": (_address(call.peer()), 0)})
        except ApiError as error:
            await _abort(call, error)
        return pb.GetModelInfoResponse(
            served_names=self.context.model_names,
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


def health_handler(problem: Callable[[], Awaitable[str | None]]) -> grpc.GenericRpcHandler:
    """The standard health service, for every service name. Its messages are encoded here: a second copy of their
    definition would clash with grpcio-health-checking's in a process that has both."""

    async def check(request: bytes, call: Call) -> bytes:
        return SERVING if await problem() is None else NOT_SERVING

    async def watch(request: bytes, call: Call) -> AsyncIterator[bytes]:
        last = b""
        while True:
            status = await check(request, call)
            if status != last:
                yield status
            last = status
            await asyncio.sleep(WATCH_SECONDS)

    methods = {
        "Check": grpc.unary_unary_rpc_method_handler(check),
        "Watch": grpc.unary_stream_rpc_method_handler(watch),
    }
    return grpc.method_handlers_generic_handler(HEALTH, methods)


async def _abort(call: Call, error: ApiError) -> NoReturn:
    default = grpc.StatusCode.INTERNAL if error.status >= 500 else grpc.StatusCode.INVALID_ARGUMENT
    await call.abort(CODES.get(error.status, default), error.message)
    raise AssertionError("abort() raises")


def _address(peer: str) -> str:
    """ipv4:1.2.3.4:567 and ipv6:%5B::1%5D:567 without the port: who it is, for rate limits."""
    return peer.rpartition(":")[0]
