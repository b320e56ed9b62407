"""The dialect of OpenAI's Responses API."""

from typing import Any

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from quire.entrypoints.http.context import ServerContext
from quire.entrypoints.http.dialect import Dialect
from quire.entrypoints.openai.errors import ERROR_BODIES, error_body
from quire.entrypoints.openai.params import ParamsBuilder
from quire.entrypoints.openai.pools_only import refused
from quire.entrypoints.openai.render import RenderEndpoint
from quire.entrypoints.openai.translated import CountEndpoint
from quire.entrypoints.responses.endpoint import ResponsesEndpoint
from quire.entrypoints.responses.protocol import CountRequest, ResponsesRequest
from quire.entrypoints.responses.stored import StoredEndpoints

PATH = "/v1/responses"
ONE = PATH + "/{response_id}"


def count_shape(num_tokens: int) -> dict[str, Any]:
    return {"object": "response.input_tokens", "input_tokens": num_tokens}


def routes(context: ServerContext) -> list[Route]:
    if context.config.tokens_only:
        return []
    setup = context.engine_config.pooling.setup
    if setup is not None:
        return refused(setup, BODIES)
    params = ParamsBuilder(context.config, context.engine.max_model_len, context.engine_config.model)
    endpoint = ResponsesEndpoint(context, params)
    stored = StoredEndpoints(endpoint)

    # An application, not a function: it may stream.
    class One:
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await stored.one(scope, receive, send)

    return [
        Route(PATH, endpoint, methods=["POST"]),
        Route(f"{PATH}/render", RenderEndpoint(endpoint, single=True), methods=["POST"]),
        Route(
            f"{PATH}/input_tokens",
            CountEndpoint(endpoint, CountRequest, endpoint.continued, count_shape),
            methods=["POST"],
        ),
        Route(ONE, One(), methods=["GET", "DELETE"]),
        Route(f"{ONE}/cancel", stored.cancel, methods=["POST"]),
        Route(f"{ONE}/input_items", stored.input_items, methods=["GET"]),
    ]


BODIES: dict[str, type[msgspec.Struct]] = {
    PATH: ResponsesRequest,
    f"{PATH}/render": ResponsesRequest,
    f"{PATH}/input_tokens": CountRequest,
}
RESPONSES = Dialect("responses", routes, error_body, prefixes=(PATH,), error_formats=ERROR_BODIES, bodies=BODIES)
