"""The endpoints that generate nothing: models, tokens, health, metrics, and those for administrators."""

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire import __version__
from quire.engine.async_engine import EngineDeadError
from quire.engine.metrics import combined
from quire.entrypoints.openai.chat import render, takes_long
from quire.entrypoints.openai.context import LONG_TEXT, ServerContext
from quire.entrypoints.openai.errors import bad_request, engine_dead, json_response, overloaded, refused_value
from quire.entrypoints.openai.http_metrics import CONTENT_TYPE, prometheus_text
from quire.entrypoints.openai.protocol import AbortRequest, DetokenizeRequest, TokenizeRequest

Handler = Callable[[Request], Awaitable[Response]]
SECRETS = ("api_key", "ssl_keyfile_password")


class PlainEndpoints:
    def __init__(self, context: ServerContext) -> None:
        self.context = context
        self.engine = context.engine

    def routes(self) -> list[Route]:
        routes: list[tuple[str, Handler, tuple[str, ...]]] = [
            ("/v1/models", self.models, ("GET",)),
            ("/v1/models/{name:path}", self.model, ("GET",)),
            ("/tokenize", self.tokenize, ("POST",)),
            ("/detokenize", self.detokenize, ("POST",)),
            ("/health", self.health, ("GET",)),
            ("/ready", self.ready, ("GET",)),
            ("/ping", self.health, ("GET", "POST")),
            ("/version", self.version, ("GET",)),
            ("/metrics", self.metrics, ("GET",)),
            ("/load", self.load, ("GET",)),
        ]
        if self.context.config.enable_admin:
            routes += [
                ("/reset_prefix_cache", self.reset_prefix_cache, ("POST",)),
                ("/abort_requests", self.abort_requests, ("POST",)),
                ("/server_info", self.server_info, ("GET",)),
            ]
        return [Route(path, handler, methods=list(methods)) for path, handler, methods in routes]

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._card(name) for name in self.context.model_names]})

    async def model(self, request: Request) -> Response:
        return json_response(self._card(self.context.check_model(request.path_params["name"])))

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.context.created,
            "owned_by": "quire",
            "root": self.engine.model_name,
            "parent": None,
            "max_model_len": self.engine.max_model_len,
        }

    async def tokenize(self, http: Request) -> Response:
        context = self.context
        request, size = await context.bodies.read(http.scope, http.receive, TokenizeRequest)
        context.check_model(request.model)
        tokenizer = context.tokenizer
        if (request.prompt is None) == (request.messages is None):
            raise bad_request("give either prompt or messages", "prompt")

        def tokenized() -> tuple[list[int], list[str] | None]:
            if request.messages is not None:
                ids = render(context, request, {}, size).token_ids
            else:
                context.check_chars(len(request.prompt or ""), "prompt")
                try:
                    ids = tokenizer.encode(request.prompt or "", request.add_special_tokens is not False)
                except ValueError as error:
                    raise refused_value(error, (), "prompt") from None
            return ids, tokenizer.convert_ids_to_tokens(ids) if request.return_token_strs else None

        ids, strings = await context.off_loop_if(takes_long(request, size), tokenized)
        shape = {"count": len(ids), "max_model_len": self.engine.max_model_len, "tokens": ids, "token_strs": strings}
        return json_response(shape)

    async def detokenize(self, http: Request) -> Response:
        request, size = await self.context.bodies.read(http.scope, http.receive, DetokenizeRequest)
        self.context.check_model(request.model)
        tokenizer, ids, longest = self.context.tokenizer, request.tokens, self.engine.max_model_len
        if len(ids) > longest:
            raise bad_request(f"tokens holds {len(ids)} ids; at most {longest} are allowed (--max-model-len)", "tokens")
        skip = bool(request.skip_special_tokens)
        text = await self.context.off_loop_if(size > LONG_TEXT, lambda: tokenizer.decode(ids, skip))
        return json_response({"prompt": text})

    async def health(self, request: Request) -> Response:
        try:
            await self.engine.check_health()
        except EngineDeadError:
            raise engine_dead() from None
        return Response(status_code=200)

    async def ready(self, request: Request) -> Response:
        """Unlike /health also 503 while the server shuts down, so that no new work is sent to it."""
        if self.context.draining:
            return Response(status_code=503)
        return await self.health(request)

    async def version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        others = await self.context.peers.metrics()
        if others is None:  # a sum without them would look like a restart
            raise overloaded("an API process of this server does not answer", 1)
        metrics = combined([self.context.own_metrics(), *others])
        return Response(prometheus_text(metrics), headers={"content-type": CONTENT_TYPE})

    async def load(self, request: Request) -> Response:
        stats, jobs = self.engine.stats, self.context.peers.num_jobs
        shape = {"server_load": jobs, "running": stats.num_running, "waiting": stats.num_waiting}
        return json_response(shape)

    # For administrators

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
        state = await self.engine.get_state()
        state["front_end"]["jobs"] = len(self.context.jobs)
        shape = {"version": __version__, "model": self.engine.model_name, "server": server, "engine": engine}
        return json_response(shape | {"state": state})
