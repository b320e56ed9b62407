"""Errors of requests: a status, a message, the field. A dialect encodes them in its own schema."""

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from quire.engine.async_engine import EngineDeadError, EngineStalledError

logger = logging.getLogger("quire")

INVALID = "invalid_request_error"
SERVER = "server_error"
MAX_MESSAGE = 2000  # characters: messages may quote what the client sent


class ApiError(Exception):
    """Sent to the client verbatim, so its message must contain nothing internal."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}..."
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def response(self, body: bytes) -> Response:
        return Response(body, self.status, self.headers, media_type="application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def not_available(param: str, what: str) -> ApiError:
    return bad_request(f"{param}: {what} is not available yet; leave it out", param, "not_available")


def overloaded(message: str, retry_after: float, headers: Mapping[str, str] | None = None) -> ApiError:
    return ApiError(503, message, type=SERVER, code="overloaded", headers={**retry(retry_after), **(headers or {})})


def engine_dead() -> ApiError:
    message = "the engine is not running; the server's log holds the cause"
    return ApiError(503, message, type=SERVER, code="engine_dead", headers=retry(5))


def engine_stalled(error: EngineStalledError) -> ApiError:
    return ApiError(503, str(error), type=SERVER, code="engine_stalled", headers=retry(5))


def internal_error(request_id: str) -> ApiError:
    return ApiError(500, f"internal error; see the server's log for request id {request_id}", type=SERVER)


def as_api_error(error: BaseException, scope: Scope) -> ApiError:
    """The part of an error that is safe to send; internal errors are logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDeadError):
        return engine_dead()
    if isinstance(error, EngineStalledError):
        return engine_stalled(error)
    request_id = scope.get("quire.request_id", "")
    logger.error("request %s failed", request_id, exc_info=error)
    return internal_error(request_id)


def retry(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, int(seconds + 0.999)))}


def json_response(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
