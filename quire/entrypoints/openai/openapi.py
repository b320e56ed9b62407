"""GET /openapi.json: the endpoints for tools that read OpenAPI, made from the routes and the request bodies."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.routing import Route

from quire import __version__
from quire.entrypoints.openai.protocol import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/abort_requests": AbortRequest,
}
ERRORS = {
    "400": "a field is wrong",
    "401": "the API key is missing or not known",
    "404": "the model or path does not exist",
    "413": "the body is too large",
    "429": "the rate limit is used up",
    "500": "the request failed inside",
    "503": "too many requests wait, or the engine is not running",
}
TEXT_PATHS = {"/metrics": "text/plain"}
ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def openapi_document(routes: Sequence[Route]) -> dict[str, Any]:
    references, schemas = msgspec.json.schema_components(BODIES.values(), ref_template="#/components/schemas/{name}")
    bodies = dict(zip(BODIES, references, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operations = paths.setdefault(re.sub(r"{(\w+):\w+}", r"{\1}", route.path), {})
        for method in sorted((route.methods or set()) - {"HEAD"}):
            operations[method.lower()] = _operation(route, bodies.get(route.path))
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": __version__},
        "paths": paths,
        "components": {"schemas": {**schemas, "Error": ERROR_SCHEMA}},
    }


def _operation(route: Route, body: dict[str, Any] | None) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    content: dict[str, Any] = {TEXT_PATHS.get(route.path, "application/json"): {}}
    if route.path in ("/v1/completions", "/v1/chat/completions"):
        content["text/event-stream"] = {}
    answers: dict[str, Any] = {"200": {"description": "the answer", "content": content}}
    answers |= {status: {"description": text, "content": error} for status, text in ERRORS.items()}
    operation: dict[str, Any] = {"responses": answers}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    names = re.findall(r"{(\w+)", route.path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return operation
