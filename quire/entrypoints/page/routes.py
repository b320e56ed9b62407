"""The page's dialect: its files, which are open, and the live view, which is keyed like every other call."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from quire import __version__
from quire.entrypoints.http.context import ServerContext
from quire.entrypoints.http.dialect import Dialect
from quire.entrypoints.http.errors import ApiError, json_response
from quire.entrypoints.http.exposure import is_public
from quire.entrypoints.openai.errors import ERROR_BODIES, error_body
from quire.entrypoints.page.access import why_not
from quire.entrypoints.page.static_files import static_files, static_routes
from quire.entrypoints.page.view_feed import ViewFeed

STREAM_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no", "x-content-type-options": "nosniff"}


class PageEndpoints:
    def __init__(self, context: ServerContext) -> None:
        self.context = context
        self.feed = ViewFeed(context)

    def routes(self) -> list[Route]:
        return [
            *static_routes(),
            Route("/view/info", self.info, methods=["GET"], include_in_schema=False),
            Route("/view/stream", self.stream, methods=["GET"], include_in_schema=False),
        ]

    async def info(self, request: Request) -> Response:
        """What the page shows of this server, and what of it this client may use."""
        context = self.context
        refused = why_not(request, context.config, context.keys is not None)
        shape: dict[str, Any] = {
            "version": __version__,
            "models": context.shown_names,
            "max_model_len": context.engine.max_model_len,
            "max_num_seqs": context.engine.max_num_seqs,
            "max_logprobs": context.engine_config.model.max_logprobs,
            "max_n": context.config.max_n,
            "max_stop": context.config.max_stop,
            "tools": context.parsers.tools or None,
            "reasoning": context.parsers.reasoning or None,
            "pools": context.pools,
            "keys": context.keys is not None,
            "view": refused is None,
            "view_refused": refused,
            "open_to_network": is_public(context.config) and context.keys is None,
        }
        return json_response(shape)

    async def stream(self, request: Request) -> Response:
        refused = why_not(request, self.context.config, self.context.keys is not None)
        if refused is not None:
            raise ApiError(403, refused, code="view_not_available")
        self.feed.check_room()
        return StreamingResponse(self.feed.watch(), headers=STREAM_HEADERS, media_type="text/event-stream")


def routes(context: ServerContext) -> list[Route]:
    if context.config.disable_page or context.config.tokens_only:
        return []
    return PageEndpoints(context).routes()


PAGE = Dialect(
    "page",
    routes,
    error_body,
    prefixes=("/page", "/view"),
    open_paths=tuple(file.path for file in static_files()),
    error_formats=ERROR_BODIES,
)
