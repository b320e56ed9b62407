"""Operators' endpoints: health, metrics, load, and those of --enable-admin."""

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Protocol, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire import __version__
from quire.config.shown import without_passwords
from quire.engine.async_engine import EngineDeadError
from quire.entrypoints.http.adapters import AdapterEndpoints
from quire.entrypoints.http.context import ServerContext
from quire.entrypoints.http.control import ControlEndpoints
from quire.entrypoints.http.errors import engine_dead, json_response, overloaded
from quire.entrypoints.http.exposure import is_public
from quire.entrypoints.http.metrics import CONTENT_TYPE, prometheus_text
from quire.entrypoints.http.process_metrics import process_metrics
from quire.metrics.kinds import combined

Handler = Callable[[Request], Awaitable[Response]]
SECRETS = ("api_key", "ssl_keyfile_password")


class AbortRequest(msgspec.Struct, kw_only=True):
    request_ids: list[str]


class ProfiledEngine(Protocol):
    """An engine that was given a profiler_config."""

    async def start_profile(self) -> None: ...

    async def stop_profile(self) -> None: ...


class AdminEndpoints:
    def __init__(self, context: ServerContext) -> None:
        self.context = context
        self.engine = context.engine

    def routes(self) -> list[Route]:
        routes: list[tuple[str, Handler, tuple[str, ...]]] = [
            ("/health", self.health, ("GET",)),
            ("/ready", self.ready, ("GET",)),
            ("/readyz", self.ready, ("GET",)),
            ("/ping", self.health, ("GET", "POST")),
            ("/version", self.version, ("GET",)),
            ("/metrics", self.metrics, ("GET",)),
            ("/load", self.load, ("GET",)),
            ("/get_world_size", self.world_size, ("GET",)),
            ("/kv_event_sources", self.kv_event_sources, ("GET",)),
        ]
        if getattr(self.context.engine_config.observability, "profiler_config", None):
            routes += [
                ("/start_profile", self.start_profile, ("POST",)),
                ("/stop_profile", self.stop_profile, ("POST",)),
            ]
        if self.context.config.enable_admin:
            routes += [
                ("/reset_prefix_cache", self.reset_prefix_cache, ("POST",)),
                ("/abort_requests", self.abort_requests, ("POST",)),
                ("/server_info", self.server_info, ("GET",)),
            ]
        made = [Route(path, handler, methods=list(methods)) for path, handler, methods in routes]
        context = self.context
        if context.config.enable_admin:
            exposed = context.keys is None and is_public(context.config)
            made += ControlEndpoints(context.engine, context.bodies, exposed).routes()
        if context.config.enable_admin or context.config.allow_runtime_lora_updating:
            made += AdapterEndpoints(context.adapters, context.bodies, context.peers, context.model_names).routes()
        return made

    async def health(self, request: Request) -> Response:
        try:
            await self.engine.check_health()
        except EngineDeadError:
            raise engine_dead() from None
        return Response(status_code=200)

    async def ready(self, request: Request) -> Response:
        """Like /health, but also 503 while the server drains, so that load balancers send no new requests."""
        if self.context.draining:
            return Response(status_code=503)
        return await self.health(request)

    async def version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        others = await self.context.peers.metrics()
        if others is None:  # a partial sum would look like a counter reset
            raise overloaded("an API process of this server does not respond", 1)
        metrics = [*combined([self.context.own_metrics(), *others]), *process_metrics()]
        text = prometheus_text(metrics, self.context.config.metrics_prefix)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def load(self, request: Request) -> Response:
        stats, jobs = self.engine.stats, self.context.peers.num_jobs
        shape = {"server_load": jobs, "running": stats.num_running, "waiting": stats.num_waiting}
        return json_response(shape)

    async def world_size(self, request: Request) -> Response:
        parallel = self.context.engine_config.parallel
        return json_response({"world_size": parallel.tensor_parallel_size * parallel.pipeline_parallel_size})

    async def kv_event_sources(self, request: Request) -> Response:
        return json_response(await self.engine.get_kv_event_sources())

    # With --profiler-config

    async def start_profile(self, request: Request) -> Response:
        await cast(ProfiledEngine, self.engine).start_profile()
        return Response(status_code=200)

    async def stop_profile(self, request: Request) -> Response:
        await cast(ProfiledEngine, self.engine).stop_profile()
        return Response(status_code=200)

    # With --enable-admin

    async def reset_prefix_cache(self, request: Request) -> Response:
        return json_response({"reset": await self.engine.reset_prefix_cache()})

    async def abort_requests(self, http: Request) -> Response:
        request, _ = await self.context.bodies.read(http.scope, http.receive, AbortRequest)
        aborted = await self.context.abort(request.request_ids)
        aborted += await self.context.peers.abort(request.request_ids)
        return json_response({"aborted": aborted})

    async def server_info(self, request: Request) -> Response:
        server = dataclasses.asdict(self.context.config)
        server |= {name: "hidden" for name in SECRETS if server[name]}
        engine = dataclasses.asdict(self.context.engine_config)
        engine["model"].pop("hf_config", None)
        engine["transfer"] = without_passwords(engine["transfer"])
        state = await self.engine.get_state()
        state["front_end"]["jobs"] = len(self.context.jobs)
        shape = {"version": __version__, "model": self.engine.model_name, "server": server, "engine": engine}
        return json_response(shape | {"state": state})
