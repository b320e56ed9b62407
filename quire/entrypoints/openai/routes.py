"""OpenAI's dialect: its endpoints, and vLLM's beside them."""

import json

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.config.server import ServerConfig
from quire.entrypoints.http.context import ServerContext
from quire.entrypoints.http.dialect import Dialect
from quire.entrypoints.http.errors import json_response
from quire.entrypoints.openai.chat import ChatEndpoint
from quire.entrypoints.openai.completions import CompletionEndpoint
from quire.entrypoints.openai.errors import error_body
from quire.entrypoints.openai.models import ModelEndpoints
from quire.entrypoints.openai.openapi import openapi_document
from quire.entrypoints.openai.params import ParamsBuilder
from quire.entrypoints.openai.tool_request import ToolSetup

SCHEMA_PATH = "/openapi.json"


def routes(context: ServerContext) -> list[Route]:
    params = ParamsBuilder(context.config, context.engine.max_model_len, context.engine_config.model)

    async def openapi(request: Request) -> Response:
        served = [route for route in request.app.routes if route.path != SCHEMA_PATH]
        return json_response(openapi_document(served, context.config, context.model_names, context.has_keys))

    schema = [] if context.config.disable_fastapi_docs else [Route(SCHEMA_PATH, openapi, methods=["GET"])]
    return [
        Route("/v1/completions", CompletionEndpoint(context, params), methods=["POST"]),
        Route("/v1/chat/completions", ChatEndpoint(context, params), methods=["POST"]),
        *ModelEndpoints(context).routes(),
        *schema,
    ]


def check(config: ServerConfig) -> None:
    ToolSetup(config, None)


def example(url: str, name: str) -> str:
    message = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello"}]})
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{message}'"


# All paths: operators' endpoints and unknown paths have OpenAI's errors too.
OPENAI = Dialect("openai", routes, error_body, prefixes=("/",), check=check, example=example)
