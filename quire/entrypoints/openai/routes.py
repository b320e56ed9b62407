"""OpenAI's dialect: its endpoints, and vLLM's beside them."""

import json
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from quire.config.server import ServerConfig
from quire.entrypoints.http.context import ServerContext
from quire.entrypoints.http.dialect import Dialect, dialects
from quire.entrypoints.http.documentation import documentation
from quire.entrypoints.http.errors import json_response
from quire.entrypoints.openai.batch_chat import BatchChatEndpoint
from quire.entrypoints.openai.chat import ChatEndpoint, load_plugins
from quire.entrypoints.openai.completions import CompletionEndpoint
from quire.entrypoints.openai.derender import DerenderChatEndpoint, DerenderCompletionEndpoint
from quire.entrypoints.openai.errors import ERROR_BODIES, error_body
from quire.entrypoints.openai.invocations import InvocationsEndpoint
from quire.entrypoints.openai.models import ModelEndpoints
from quire.entrypoints.openai.openapi import openapi_document
from quire.entrypoints.openai.params import ParamsBuilder
from quire.entrypoints.openai.pools_only import refused
from quire.entrypoints.openai.render import RenderEndpoint
from quire.entrypoints.openai.tokens import TokensEndpoint
from quire.entrypoints.parsers.detect import OFF
from quire.entrypoints.parsers.reasoning import reasoning_format
from quire.entrypoints.parsers.tools.registry import tool_parser

SCHEMA_PATH = "/openapi.json"
GENERATING = (
    "/v1/completions",
    "/v1/completions/derender",
    "/v1/completions/render",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/chat/completions/derender",
    "/v1/chat/completions/render",
    "/inference/v1/generate",
)


def routes(context: ServerContext) -> list[Route]:
    params = ParamsBuilder(context.config, context.engine.max_model_len, context.engine_config.model)

    async def openapi(request: Request) -> Response:
        served = [route for route in request.app.routes if route.include_in_schema]
        names = () if context.adapters.enabled else context.model_names  # adapters come and go
        with_keys = context.keys is not None
        return json_response(openapi_document(served, context.config, names, with_keys, dialects()))

    setup = context.engine_config.pooling.setup
    if setup is not None:
        return [*refused(setup, GENERATING), *_shared(context, openapi)]
    completions, chat = CompletionEndpoint(context, params), ChatEndpoint(context, params)
    endpoints: dict[str, ASGIApp] = {
        "/v1/completions": completions,
        "/v1/completions/derender": DerenderCompletionEndpoint(context, completions),
        "/v1/completions/render": RenderEndpoint(completions, single=False),
        "/v1/chat/completions": chat,
        "/v1/chat/completions/batch": BatchChatEndpoint(context, params, chat),
        "/v1/chat/completions/derender": DerenderChatEndpoint(context, chat),
        "/v1/chat/completions/render": RenderEndpoint(chat, single=True),
        "/inference/v1/generate": TokensEndpoint(context, params),
    }
    routes = [Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]
    invocations = InvocationsEndpoint(context.bodies, {"messages": chat, "prompt": completions})
    routes += [Route("/invocations", invocations, methods=["POST"], include_in_schema=False)]
    routes += _shared(context, openapi)
    if context.config.tokens_only:
        kept = ("/inference/", "/v1/models", SCHEMA_PATH, "/docs")
        routes = [route for route in routes if route.path.startswith(kept)]
    return routes


def _shared(context: ServerContext, openapi: Callable[[Request], Awaitable[Response]]) -> list[Route]:
    """Those of any model."""
    routes = ModelEndpoints(context).routes()
    if not context.config.disable_fastapi_docs:
        routes += [Route(SCHEMA_PATH, openapi, methods=["GET"], include_in_schema=False), *documentation()]
    return routes


def check(config: ServerConfig) -> None:
    load_plugins(config)
    if config.tool_call_parser and config.tool_call_parser != OFF:
        tool_parser(config.tool_call_parser)
    if config.reasoning_parser and config.reasoning_parser != OFF:
        reasoning_format(config.reasoning_parser)


def example(url: str, name: str) -> str:
    message = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello"}]})
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{message}'"


# All paths: operators' endpoints and unknown paths have OpenAI's errors too.
OPENAI = Dialect(
    "openai", routes, error_body, prefixes=("/",), check=check, example=example, error_formats=ERROR_BODIES
)
