"""Errors in OpenAI's schema, or with vLLM's types and codes; both name the request's field."""

import re
from collections.abc import Callable, Collection
from http import HTTPStatus

import msgspec

from quire.entrypoints.http.errors import ApiError, bad_request

OTHER_NAMES = {"extra_args": "vllm_xargs"}  # SamplingParams field -> request field


def error_body(error: ApiError) -> bytes:
    shape = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": shape})


# By status; others have its phrase.
VLLM_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    422: "UnprocessableEntityError",
    500: "InternalServerError",
    501: "NotImplementedError",
}


PYDANTIC_TYPES = {">=": "greater_than_equal", "<=": "less_than_equal"}  # programs look for them in messages


def vllm_error_body(error: ApiError) -> bytes:
    """The code is the status."""
    kind = VLLM_TYPES.get(error.status) or HTTPStatus(error.status).phrase
    message = error.message
    if limit := re.search(r": expected (?:int|float) (>=|<=)", message):
        message += f" ({PYDANTIC_TYPES[limit[1]]})"
    shape = {"message": message, "type": kind, "param": error.param, "code": error.status}
    return msgspec.json.encode({"error": shape})


ERROR_BODIES: dict[str, Callable[[ApiError], bytes]] = {"openai": error_body, "vllm": vllm_error_body}


def refused_value(error: ValueError, fields: Collection[str], default: str | None = None) -> ApiError:
    """Validation errors name the field first: `temperature is -1; it must be ...`."""
    message = str(error)
    first = message.split(" ", 1)[0].rstrip(":;,").split("[")[0]
    first = OTHER_NAMES.get(first, first)
    return bad_request(message, param=first if first in fields else default)
