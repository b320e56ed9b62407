"""Error responses: a status, and a body that names the field, in OpenAI's schema unless a dialect has its own."""

import logging
from collections.abc import Callable, Collection, Mapping
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

    def response(self, body: "Callable[[ApiError], bytes] | None" = None) -> Response:
        content = openai_body(self) if body is None else body(self)
        return Response(content, self.status, self.headers, media_type="application/json")


def openai_body(error: ApiError) -> bytes:
    shape = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": shape})


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


OTHER_NAMES = {"extra_args": "vllm_xargs"}  # SamplingParams field -> request field


def refused_value(error: ValueError, fields: Collection[str], default: str | None = None) -> ApiError:
    """Validation errors name the field first: `temperature is -1; it must be ...`."""
    message = str(error)
    first = message.split(" ", 1)[0].rstrip(":;,").split("[")[0]
    first = OTHER_NAMES.get(first, first)
    return bad_request(message, param=first if first in fields else default)


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
