"""Errors in OpenAI's schema, which name the request's field."""

from collections.abc import Collection

import msgspec

from quire.entrypoints.http.errors import ApiError, bad_request

OTHER_NAMES = {"extra_args": "vllm_xargs"}  # SamplingParams field -> request field


def error_body(error: ApiError) -> bytes:
    shape = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": shape})


def refused_value(error: ValueError, fields: Collection[str], default: str | None = None) -> ApiError:
    """Validation errors name the field first: `temperature is -1; it must be ...`."""
    message = str(error)
    first = message.split(" ", 1)[0].rstrip(":;,").split("[")[0]
    first = OTHER_NAMES.get(first, first)
    return bad_request(message, param=first if first in fields else default)
