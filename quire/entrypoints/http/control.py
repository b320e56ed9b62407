"""Operators' and trainers' endpoints of --enable-admin: pause, sleep, new weights, calls of workers' methods."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.config.shown import shown
from quire.engine.async_engine import EngineCallError
from quire.entrypoints.http.body import BodyReader
from quire.entrypoints.http.errors import ApiError, bad_request, json_response
from quire.entrypoints.http.exposure import is_cross_site
from quire.weights.engine_methods import PAUSE_MODES

# By path, the method of ControlEndpoints.
GET = {"/is_paused": "is_paused", "/is_sleeping": "is_sleeping", "/weight_info": "weight_info"}
POST = {
    "/pause": "pause",
    "/resume": "resume",
    "/sleep": "sleep",
    "/wake_up": "wake_up",
    "/release_kv_cache_memory": "release_kv_cache_memory",
    "/init_weight_transfer_engine": "init_transfer",
    "/shutdown_weight_transfer_engine": "shutdown_transfer",
    "/start_weight_update": "start_update",
    "/start_draft_weight_update": "start_draft_update",
    "/update_weights": "update_weights",
    "/finish_weight_update": "finish_update",
    "/update_weight_version": "update_version",
    "/collective_rpc": "collective_rpc",
}
PATHS = GET.keys() | POST.keys()
TAGS = ("weights", "kv_cache", "scheduling")
Handler = Callable[[Request], Awaitable[Response]]
_METHOD = re.compile(r"[a-z][a-z_0-9]*")


class InitRequest(msgspec.Struct, kw_only=True):
    init_info: dict[str, Any]


class UpdateRequest(msgspec.Struct, kw_only=True):
    update_info: dict[str, Any] | list[dict[str, Any]]


class FinishRequest(msgspec.Struct, kw_only=True):
    weight_version: str | None = None


class VersionRequest(msgspec.Struct, kw_only=True):
    new_version: str


class RpcRequest(msgspec.Struct, kw_only=True):
    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = None


class ControlledEngine(Protocol):
    """AsyncLLM, as far as these endpoints call it."""

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None: ...
    async def resume_generation(self) -> None: ...
    async def is_paused(self) -> bool: ...
    async def sleep(self, level: int = 1, mode: str = "abort") -> None: ...
    async def wake_up(self, tags: Sequence[str] | None = None) -> bool: ...
    async def is_sleeping(self) -> bool: ...
    async def release_kv_cache_memory(self) -> None: ...
    async def init_weight_transfer_engine(self, request: Any) -> None: ...
    async def shutdown_weight_transfer_engine(self) -> None: ...
    async def start_weight_update(self) -> None: ...
    async def start_draft_weight_update(self) -> None: ...
    async def update_weights(self, request: Any) -> None: ...
    async def finish_weight_update(self, weight_version: str | None = None) -> None: ...
    async def update_weight_version(self, new_version: str) -> None: ...
    async def get_weight_version(self) -> str: ...
    async def collective_rpc(
        self, method: str, timeout: float | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any]: ...


class ControlEndpoints:
    """Under vLLM's names, with its parameters and answers."""

    def __init__(self, engine: Any, bodies: BodyReader, exposed: bool = False) -> None:
        """`exposed`: others than this machine's users can connect, without a key. They may look, and change nothing."""
        self._engine, self._bodies, self._exposed = cast(ControlledEngine, engine), bodies, exposed

    def routes(self) -> list[Route]:
        get = [Route(path, _refusing(getattr(self, name)), methods=["GET"]) for path, name in GET.items()]
        post = [(path, self._guarded(_refusing(getattr(self, name)))) for path, name in POST.items()]
        return [*get, *(Route(path, handler, methods=["POST"]) for path, handler in post)]

    def _guarded(self, handler: Handler) -> Handler:
        async def handle(request: Request) -> Response:
            if self._exposed:
                raise ApiError(403, "the server is open to the network and has no API keys; set one (--api-key)")
            if is_cross_site(request):
                raise ApiError(403, "a page of another site may not change this engine")
            return await handler(request)

        return handle

    async def pause(self, request: Request) -> Response:
        mode = _choice(request, "mode", PAUSE_MODES, "abort")
        clear = _choice(request, "clear_cache", ("true", "false", "1", "0"), "true") in ("true", "1")
        await self._engine.pause_generation(mode=mode, clear_cache=clear)
        return json_response({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        await self._engine.resume_generation()
        return json_response({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        return json_response({"is_paused": await self._engine.is_paused()})

    async def sleep(self, request: Request) -> Response:
        level = int(_choice(request, "level", ("0", "1", "2"), "1"))
        await self._engine.sleep(level, _choice(request, "mode", PAUSE_MODES, "abort"))
        return json_response({"status": "sleeping", "level": level})

    async def wake_up(self, request: Request) -> Response:
        tags = request.query_params.getlist("tags") or None
        for tag in tags or ():
            if tag not in TAGS:
                raise bad_request(f"tags has {shown(tag)}; allowed: {', '.join(TAGS)}", "tags")
        awake = await self._engine.wake_up(tags)
        return json_response({"status": "awake" if awake else "sleeping", "tags": tags})

    async def is_sleeping(self, request: Request) -> Response:
        return json_response({"is_sleeping": await self._engine.is_sleeping()})

    async def release_kv_cache_memory(self, request: Request) -> Response:
        await self._engine.release_kv_cache_memory()
        return json_response({"status": "kv_cache_released"})

    async def init_transfer(self, http: Request) -> Response:
        request, _ = await self._bodies.read(http.scope, http.receive, InitRequest)
        await self._engine.init_weight_transfer_engine({"init_info": request.init_info})
        return json_response({"message": "Weight transfer initialized"})

    async def shutdown_transfer(self, request: Request) -> Response:
        await self._engine.shutdown_weight_transfer_engine()
        return json_response({"message": "Weight transfer shut down"})

    async def start_update(self, request: Request) -> Response:
        await self._engine.start_weight_update()
        return json_response({"message": "Weight update started"})

    async def start_draft_update(self, request: Request) -> Response:
        await self._engine.start_draft_weight_update()
        return json_response({"message": "Draft weight update started"})

    async def update_weights(self, http: Request) -> Response:
        request, _ = await self._bodies.read(http.scope, http.receive, UpdateRequest)
        await self._engine.update_weights({"update_info": request.update_info})
        return json_response({"message": "Weights updated"})

    async def finish_update(self, http: Request) -> Response:
        version = None
        if http.headers.get("content-length", "0") != "0" or "transfer-encoding" in http.headers:
            request, _ = await self._bodies.read(http.scope, http.receive, FinishRequest)
            version = request.weight_version
        await self._engine.finish_weight_update(version)
        return json_response({"message": "Weight update finished"})

    async def update_version(self, http: Request) -> Response:
        request, _ = await self._bodies.read(http.scope, http.receive, VersionRequest)
        await self._engine.update_weight_version(request.new_version)
        return json_response({"success": True, "new_version": request.new_version})

    async def weight_info(self, request: Request) -> Response:
        return json_response({"weight_version": await self._engine.get_weight_version()})

    async def collective_rpc(self, http: Request) -> Response:
        request, _ = await self._bodies.read(http.scope, http.receive, RpcRequest)
        if not _METHOD.fullmatch(request.method):
            raise bad_request(f"method is {shown(request.method)}; it must be a public method of workers", "method")
        results = await self._engine.collective_rpc(request.method, request.timeout, request.args, request.kwargs)
        plain = [one if one is None or isinstance(one, (dict, list)) else str(one) for one in results]
        return json_response({"results": plain})


def _choice(request: Request, name: str, allowed: Sequence[str], default: str) -> str:
    given = request.query_params.get(name, default)
    if given not in allowed:
        raise bad_request(f"{name} is {shown(given)}; allowed: {', '.join(allowed)}", name)
    return given


def _refusing(handler: Handler) -> Handler:
    """What the engine refuses is a 400 with its reason."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except (ValueError, OverflowError, EngineCallError) as error:  # Overflow: of a number too large for messages
            raise bad_request(str(error)) from None

    return handle
