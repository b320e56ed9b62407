"""The ASGI application: all dialects' routes, operators' routes, and the middleware around them."""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.config import EngineConfig
from quire.config.server import ServerConfig
from quire.engine.async_engine import AsyncEngine
from quire.entrypoints.http.admin import AdminEndpoints
from quire.entrypoints.http.context import ServerContext
from quire.entrypoints.http.dialect import ErrorBodies, dialects
from quire.entrypoints.http.errors import ApiError
from quire.entrypoints.http.middleware import ApiKeys, ErrorResponses, RootPath, Tracking, import_middleware
from quire.entrypoints.http.peers import Peers
from quire.entrypoints.http.rate_limit import RateLimit
from quire.entrypoints.http.route_table import unserved


def build_app(
    engine: AsyncEngine,
    config: ServerConfig,
    engine_config: EngineConfig,
    api_keys: Sequence[str] = (),
    peers: Peers | None = None,
) -> Starlette:
    """`api_keys` are all accepted keys, whatever their source (`load_api_keys`). `peers` are the server's other API
    processes."""
    context = ServerContext(engine, config, engine_config, peers, api_keys or config.api_key)
    served = dialects()
    routes = [*AdminEndpoints(context).routes(), *(route for dialect in served for route in dialect.routes(context))]
    routes += unserved({route.path for route in routes})
    open_paths = {path for dialect in served for path in dialect.open_paths} & {route.path for route in routes}
    bodies = ErrorBodies(served, config.error_format)
    app = Starlette(
        routes=routes,
        middleware=_middleware(context, routes, bodies, config.unguarded_paths | open_paths),
        exception_handlers={HTTPException: _http_error},
    )
    app.router.redirect_slashes = False  # a redirected POST loses its body in many clients
    app.state.context = context
    return app


def _middleware(
    context: ServerContext, routes: Sequence[Route], error_bodies: ErrorBodies, open_paths: frozenset[str]
) -> list[Middleware]:
    """Outermost first."""
    config = context.config
    middleware = [Middleware(RootPath, config.root_path, routes)] if config.root_path else []
    middleware.append(Middleware(Tracking, context.http_metrics, routes, config.access_log, config.unlogged_paths))
    if config.allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.allowed_origins,
                allow_methods=config.allowed_methods or ("GET", "POST"),
                allow_headers=config.allowed_headers or ("*",),
                allow_credentials=config.allow_credentials,
                expose_headers=("x-request-id",),
            )
        )
    middleware.append(Middleware(ErrorResponses, error_bodies, config.log_error_stack))
    if context.keys is not None:
        middleware.append(Middleware(ApiKeys, context.keys, open_paths))
    if context.limiter is not None:
        middleware.append(Middleware(RateLimit, context.limiter, open_paths))
    return middleware + [Middleware(import_middleware(path)) for path in config.middleware]


async def _http_error(request: Request, error: Exception) -> Response:
    """The router's own errors, 404 and 405, are encoded like all others."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:200]}"
    message = f"{what}: there is no such path" if error.status_code == 404 else f"{what}: {error.detail}"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    raise ApiError(error.status_code, message, code=code, headers=error.headers)
