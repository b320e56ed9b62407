"""GET /openapi.json: the OpenAPI document, generated from the routes, the request bodies and the server's limits."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.routing import Route

from quire import __version__
from quire.config.server import ServerConfig
from quire.engine.input_processor import MAX_PRIORITY
from quire.entrypoints.chat_renderer import TEXT_PARTS
from quire.entrypoints.http.adapters import LoadRequest, UnloadRequest
from quire.entrypoints.http.admin import AbortRequest
from quire.entrypoints.http.body import CLIENT_REQUEST_ID
from quire.entrypoints.http.control import PATHS as CONTROL_PATHS
from quire.entrypoints.http.control import FinishRequest, InitRequest, RpcRequest, UpdateRequest, VersionRequest
from quire.entrypoints.http.dialect import Dialect, dialect_of
from quire.entrypoints.openai.openapi_responses import RESPONSES
from quire.entrypoints.openai.protocol import (
    BatchChatRequest,
    ChatRequest,
    CompletionRequest,
    DerenderChatRequest,
    DerenderCompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    TokensRequest,
)
from quire.entrypoints.openai.structured import FORMATS
from quire.entrypoints.pooling.protocol import (
    ClassifyRequest,
    CohereEmbedRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from quire.messages.sampling_params import MAX_TEMPERATURE

GENERATION_PATHS = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")
TIMED_PATHS = (*GENERATION_PATHS, "/v1/chat/completions/batch")
BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/completions": CompletionRequest,
    "/v1/completions/derender": DerenderCompletionRequest,
    "/v1/completions/render": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/chat/completions/batch": BatchChatRequest,
    "/v1/chat/completions/derender": DerenderChatRequest,
    "/v1/chat/completions/render": ChatRequest,
    "/inference/v1/generate": TokensRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/abort_requests": AbortRequest,
    "/collective_rpc": RpcRequest,
    "/finish_weight_update": FinishRequest,
    "/init_weight_transfer_engine": InitRequest,
    "/update_weight_version": VersionRequest,
    "/update_weights": UpdateRequest,
    "/v1/load_lora_adapter": LoadRequest,
    "/v1/unload_lora_adapter": UnloadRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v2/embed": CohereEmbedRequest,
    "/pooling": PoolingRequest,
    "/classify": ClassifyRequest,
    **dict.fromkeys(("/score", "/v1/score"), ScoreRequest),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), RerankRequest),
}
ERRORS = {
    "400": "a field is wrong",
    "401": "the API key is missing or not known",
    "403": "whoever asks may not change the engine",
    "404": "the model does not exist",
    "408": "the body did not arrive in time",
    "413": "the body is too large",
    "415": "the body is not declared as JSON",
    "429": "the rate limit is exceeded",
    "500": "internal error",
    "503": "too many requests are waiting, or the engine is not running",
    "504": "the request took longer than the server allows",
}
COMMON_STATUSES = ("401", "429", "500", "503")
BODY_STATUSES = ("400", "404", "408", "413", "415")
STATUS_PATHS = ("/health", "/ready", "/readyz", "/ping")  # their responses have no body
TEXT_PATHS = dict.fromkeys(("/metrics", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"), "text/plain")
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
TOKEN_ID = {"minimum": 0, "maximum": 2**31 - 1}
PROMPT = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "integer", **TOKEN_ID},
        {"type": "array", "minItems": 1, "items": {"type": "integer", **TOKEN_ID}},
    ]
}
COMPLETION_LIMITS = {"prompt": {"minLength": 1, "minItems": 1, "items": PROMPT}}
CONTENT_PART = {
    "type": "object",
    "required": ["text"],
    "properties": {"type": {"enum": sorted(TEXT_PARTS)}, "text": {"type": "string"}},
}
MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"type": "string", "examples": ["system", "user", "assistant", "tool"]},
        "content": {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"anyOf": [{"type": "string"}, CONTENT_PART]}},
                {"type": "null"},
            ]
        },
        "tool_calls": {"type": ["array", "null"], "items": {"type": "object"}},
    },
}


SPECIAL_LIMITS: dict[type[msgspec.Struct], dict[str, Any]] = {
    CompletionRequest: COMPLETION_LIMITS,
    BatchChatRequest: {"messages": {"minItems": 1, "items": {"type": "array", "minItems": 1, "items": MESSAGE}}},
    TokensRequest: {"token_ids": {"minItems": 1, "items": {"type": "integer", **TOKEN_ID}}},
}


# Of the constraints by field, those that other dialects' fields of these names have too.
SHARED_LIMITS = ("model", "temperature", "top_p", "top_k", "seed")


def openapi_document(
    routes: Sequence[Route],
    config: ServerConfig,
    model_names: Sequence[str],
    with_keys: bool = False,
    dialects: Sequence[Dialect] = (),
) -> dict[str, Any]:
    others = {path: body for dialect in dialects for path, body in dialect.bodies.items()}
    kinds = list(dict.fromkeys([*BODIES.values(), *others.values(), *RESPONSES.values()]))
    references, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    by_kind = dict(zip(kinds, references, strict=True))
    for kind in set(BODIES.values()):
        limits = _limits(config, model_names) | SPECIAL_LIMITS.get(kind, {})
        _add_limits(schemas[kind.__name__]["properties"], limits)
    shared = {name: limit for name, limit in _limits(config, model_names).items() if name in SHARED_LIMITS}
    for kind in set(others.values()):
        _add_limits(schemas[kind.__name__]["properties"], shared)
    errors = {dialect.name: dialect.error_schema for dialect in dialects if dialect.error_schema is not None}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operations = paths.setdefault(re.sub(r"{(\w+):\w+}", r"{\1}", route.path), {})
        kinds_here = (BODIES | others).get(route.path), RESPONSES.get(route.path)
        dialect = dialect_of(dialects, route.path).name if dialects else ""
        error_name = f"{dialect.capitalize()}Error" if dialect in errors else "Error"
        body, response = (by_kind[kind] if kind is not None else None for kind in kinds_here)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            guarded = with_keys and route.path not in config.unguarded_paths
            sent = body if method == "POST" else None
            operations[method.lower()] = _operation(route, sent, response, guarded, error_name, route.path in others)
    named_errors = {f"{name.capitalize()}Error": schema for name, schema in errors.items()}
    components: dict[str, Any] = {"schemas": {**schemas, "Error": ERROR_SCHEMA, **named_errors}}
    if with_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": __version__},
        "servers": [{"url": config.root_path or "/"}],
        "paths": paths,
        "components": components,
    }


def _limits(config: ServerConfig, model_names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Constraints by field, beyond its type. They are enforced in params.py and SamplingParams."""
    return {
        "model": {"enum": list(model_names)} if model_names else {},
        "n": {"minimum": 1, "maximum": config.max_n},
        "temperature": {"minimum": 0, "maximum": MAX_TEMPERATURE},
        "top_p": {"exclusiveMinimum": 0, "maximum": 1},
        "min_p": {"minimum": 0, "maximum": 1},
        "top_k": {"minimum": -1},
        "frequency_penalty": {"minimum": -2, "maximum": 2},
        "presence_penalty": {"minimum": -2, "maximum": 2},
        "repetition_penalty": {"minimum": 0.01, "maximum": 100},
        "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
        "max_completion_tokens": {"minimum": 1},
        "max_tokens": {"minimum": 0},
        "min_tokens": {"minimum": 0},
        "thinking_token_budget": {"minimum": 0},
        "stop": {"minLength": 1, "maxItems": config.max_stop, "items": {"type": "string", "minLength": 1}},
        "bad_words": {"items": {"type": "string", "minLength": 1}},
        "logprobs": {"minimum": -1},
        "prompt_logprobs": {"minimum": -1},
        "top_logprobs": {"minimum": -1},
        "truncation_side": {"enum": ["left", "right"]},
        "stop_token_ids": {"items": {"type": "integer", **TOKEN_ID}},
        "allowed_token_ids": {"minItems": 1, "items": {"type": "integer", **TOKEN_ID}},
        "tokens": {"items": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}},
        "priority": {"minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY},
        "request_id": {"pattern": f"^{CLIENT_REQUEST_ID.pattern}$"},
        "messages": {"minItems": 1, "items": MESSAGE},
        "suffix": {"maxLength": 0},  # only accepted if empty
        "tool_choice": {"enum": ["none", "auto", "required"]},
        "modalities": {"items": {"const": "text"}},
        "functions": {"maxItems": 0},
        "function_call": {"enum": ["none", "auto", None]},
        "audio": {"type": "null"},
        "watermarking": {"const": False},
        "return_mm_kwargs": {"const": False},
        "routed_experts_prompt_start": {"minimum": 0, "maximum": 0},
        "response_format": {"properties": {"type": {"enum": list(FORMATS)}}, "required": ["type"]},
    }


# A constraint applies to one of the types that a field may have.
KEYWORD_TYPES = {
    "minimum": ("integer", "number"),
    "maximum": ("integer", "number"),
    "exclusiveMinimum": ("integer", "number"),
    "minLength": ("string",),
    "pattern": ("string",),
    "enum": ("string", None),
    "const": ("boolean",),
    "maxLength": ("string",),
    "properties": ("object",),
    "required": ("object",),
    "type": (None,),
    "description": (None,),
    "minItems": ("array",),
    "maxItems": ("array",),
    "items": ("array",),
}


def _add_limits(properties: dict[str, Any], limits: dict[str, dict[str, Any]]) -> None:
    for name in properties.keys() & limits.keys():
        schema = properties[name]
        for choice in schema.get("anyOf", [schema]):
            choice |= {key: value for key, value in limits[name].items() if choice.get("type") in KEYWORD_TYPES[key]}


def _operation(
    route: Route,
    body: dict[str, Any] | None,
    response: dict[str, Any] | None,
    with_key: bool,
    error_name: str = "Error",
    generates: bool = False,
) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error_name}"}}}
    names = re.findall(r"{(\w+)", route.path)
    statuses = [*COMMON_STATUSES, *(BODY_STATUSES if body else ()), *(["400", "404"] if names else [])]
    statuses += [] if route.path not in CONTROL_PATHS else ["403"] if "400" in statuses else ["400", "403"]
    statuses += ["504"] if generates or route.path in TIMED_PATHS else []
    responses = {"200": {"description": "the response", **_content(route.path, response, generates)}}
    responses |= {status: {"description": ERRORS[status], "content": error} for status in sorted(statuses)}
    operation: dict[str, Any] = {"responses": responses}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if with_key:
        operation["security"] = [{"key": []}]
    return operation


def _content(path: str, response: dict[str, Any] | None, generates: bool) -> dict[str, Any]:
    if path in STATUS_PATHS:
        return {}
    if path in TEXT_PATHS:
        return {"content": {TEXT_PATHS[path]: {"schema": {"type": "string"}}}}
    content: dict[str, Any] = {"application/json": {"schema": response or {"type": "object"}}}
    if generates or path in GENERATION_PATHS:
        content["text/event-stream"] = {}
    return {"content": content}
