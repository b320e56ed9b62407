"""Errors in Anthropic's schema."""

import msgspec

from quire.entrypoints.http.errors import ApiError

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

ERROR_SCHEMA = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


def error_body(error: ApiError) -> bytes:
    default = "api_error" if error.status >= 500 else "invalid_request_error"
    shape = {"type": TYPES.get(error.status, default), "message": error.message}
    return msgspec.json.encode({"type": "error", "error": shape})
