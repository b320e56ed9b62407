"""Bodies on all routes of a real server: valid fields, some of them mutated.

An input is a line "METHOD PATH" (with " -" behind it: without an API key), then the body.
"""

import hashlib
import http.client
import json
import random
import re
from collections.abc import Iterator
from typing import Any

from tests.fuzz.mutate import NASTY, Raw, dumps, mutated_bytes, mutated_text, mutated_value
from tests.fuzz.server import MODEL, ServerTarget
from tests.structured_output.cases import SCHEMAS

USER = {"role": "user", "content": "say ab"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"x": {}}}}}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "be brief"}, USER, {"role": "assistant", "content": "ab"}, USER],
    [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ],
]
TEXT = {"type": "text", "text": "say ab"}
SCHEMA_FORMAT = {"type": "json_schema", "name": "a", "schema": SCHEMAS["object"]}
# By prefix of the path: fields whose values differ from those of completions and chat.
DIALECTS: dict[str, dict[str, list[Any]]] = {
    "/v1/responses": {
        "input": [
            "say ab",
            [USER],
            [
                {"type": "message", **USER},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "function_call", "call_id": "1", "name": "look", "arguments": '{"x": 1}'},
                {"type": "function_call_output", "call_id": "1", "output": "2"},
            ],
            [{"role": "assistant", "content": [{"type": "output_text", "text": "a"}], "status": "incomplete"}],
        ],
        "tools": [[{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {"x": {}}}}]],
        "tool_choice": ["auto", "required", {"type": "function", "name": "look"}],
        "text": [{"format": {"type": "json_object"}}, {"format": SCHEMA_FORMAT}],
        "include": [["message.output_text.logprobs"]],
        "previous_response_id": ["resp_none"],
        "truncation": ["auto", "disabled"],
        "metadata": [{"a": "b"}],
        "reasoning": [{"effort": "low"}],
        "max_output_tokens": [4],
        "prompt": [None],
        "conversation": [None],
    },
    "/v1/messages": {
        "messages": [
            [USER],
            [{"role": "user", "content": [TEXT]}, {"role": "assistant", "content": "a"}],
            [
                USER,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {"x": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [TEXT]}, TEXT]},
            ],
            [USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "a"}, TEXT]}],
        ],
        "system": ["be brief", [TEXT]],
        "tools": [[{"name": "look", "input_schema": {"type": "object", "properties": {"x": {}}}}]],
        "tool_choice": [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "look"}],
        "thinking": [{"type": "enabled", "budget_tokens": 2}, {"type": "disabled"}],
        "output_config": [{"format": {"type": "json_schema", "schema": SCHEMAS["object"]}}, {"effort": "low"}],
        "stop_sequences": [["x"]],
    },
}
MAX_DEPTH = 8  # of values made from schemas
MAX_BYTES = 1 << 20  # larger bodies are refused while they are sent, which a client may see as a reset
OPEN = ("/health", "/ready", "/readyz", "/ping", "/metrics", "/version")  # without a key
# Useful values by field. Fields without an entry get a value of their schema's type.
VALUES: dict[str, list[Any]] = {
    "model": [MODEL],
    "prompt": ["ab", ["ab", "true"], [5, 6, 7], [[5, 6], [7]]],
    "messages": CONVERSATIONS,
    "tools": [[TOOL]],
    "tool_choice": ["auto", "none", "required", {"type": "function", "function": {"name": "look"}}],
    "n": [1, 2],
    "best_of": [1, 2],
    "temperature": [0, 0.7, 2],
    "seed": [7],
    "stop": ["x", ["a", "b"]],
    "max_tokens": [4],
    "max_completion_tokens": [4],
    "min_tokens": [0, 2],
    "logit_bias": [{"5": 2.0, "6": -100}],
    "stop_token_ids": [[5], []],
    "allowed_token_ids": [[5, 6, 7]],
    "bad_words": [["a"]],
    "logprobs": [True, 1, 5],
    "top_logprobs": [2],
    "prompt_logprobs": [1],
    "truncate_prompt_tokens": [3],
    "repetition_detection": [{"max_pattern_size": 3, "min_count": 2}],
    "priority": [1],
    "response_format": [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMAS["object"]}},
    ],
    "structured_outputs": [{"regex": "[ab]{1,4}"}, {"choice": ["a", "b"]}, {"json": SCHEMAS["integer"]}],
    "guided_json": [SCHEMAS["enum"], json.dumps(SCHEMAS["boolean"])],
    "guided_regex": ["a|b"],
    "guided_choice": [["a", "b"]],
    "guided_grammar": ['root ::= "a" | "b"'],
    "guided_decoding_backend": ["auto", "guidance", "xgrammar", "outlines"],
    "use_beam_search": [True],
    "tokens": [[5, 6]],
    "request_ids": [["none"]],
    "chat_template": ["{{ messages }}", "/etc/passwd"],
    "chat_template_kwargs": [{"a": 1}],
    "documents": [[{"title": "a", "text": "b"}], ["ab", "true"], "ab"],
    "input": ["ab", ["ab", "true"], [5, 6, 7], [[5, 6], [7]], [USER]],
    "texts": [["ab", "true"]],
    "inputs": [[{"content": [{"type": "text", "text": "ab"}]}]],
    "query": ["ab", {"text": "ab"}],
    **{name: ["ab", ["ab", "true"]] for name in ("queries", "items", "text_1", "text_2", "data_1", "data_2")},
    "task": ["embed", "token_embed", "classify"],
    "encoding_format": ["float", "base64", "bytes", "bytes_only"],
    "embed_dtype": ["float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"],
    "endianness": ["little", "big"],
    "dimensions": [8],
    "output_dimension": [8],
    "embedding_types": [["float", "binary"], ["ubinary", "base64"]],
    "truncate": ["NONE", "START", "END"],
    "max_tokens_per_doc": [0, 2],
    "max_tokens_per_query": [0, 2],
    "top_n": [0, 1],
}
ALWAYS = ("prompt", "messages", "input", "max_output_tokens", "tokens", "request_ids", "max_tokens")
POOLING_ALWAYS = ("input", "texts", "query", "queries", "documents")
GENERATING = ("completions", "/v1/responses", "/v1/messages")
PATHS = ["/", "/v1", "/v1/", "/v1/models/%00", "/v1/models/../..", "/v1/completions/", "/v1/models/" + "x" * 3000]
# Python's exception names and source files.
INTERNAL = re.compile(
    r"Traceback|\b(Type|Value|Key|Attribute|Index|Runtime|Overflow|Recursion|Assertion)Error\b|\.py\b"
)
METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "QUERY"]


class HttpTarget(ServerTarget):
    name = "http"
    always = ALWAYS

    def __init__(self) -> None:
        super().__init__()
        self.schemas: dict[str, dict[str, Any]] = {}
        self.bodies: dict[str, dict[str, Any]] = {}  # fields by path
        self.routes: list[tuple[str, str]] = []

    def prepare(self) -> None:
        document = json.loads(self.server.request("GET", "/openapi.json")[2])
        self.schemas = document["components"]["schemas"]
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                self.routes.append(
                    (method.upper(), path.replace("{name}", MODEL).replace("{response_id}", "resp_none"))
                )
                if "requestBody" in operation:
                    schema = self._schema(operation["requestBody"]["content"]["application/json"]["schema"])
                    self.bodies[path] = schema["properties"]

    def finish(self) -> None:
        self.server.ensure()

    def cases(self, rng: random.Random) -> Iterator[bytes]:
        while True:
            yield self._case(rng)

    def _case(self, rng: random.Random) -> bytes:
        if rng.random() < 0.04:
            path = rng.choice([*PATHS, *(path for _, path in self.routes)])
            suffix = rng.choice(["", "?" + "a=b&" * 500, "?%ff", " -"])
            return f"{rng.choice(METHODS)} {path}{suffix}\n".encode() + rng.choice([b"", b"{}", b"\xff"])
        weights = [5 if path.endswith(GENERATING) else 1 for path in self.bodies]
        path = rng.choices(list(self.bodies), weights)[0]
        body: Any = self._body(rng, path)
        for _ in range(rng.choice([0, 1, 1, 1, 2, 4])):
            body = mutated_value(rng, body) if isinstance(body, dict) else body
        text = dumps(body)
        if rng.random() < 0.1:
            text = mutated_text(rng, text, [str(word) for word in NASTY if isinstance(word, str)])
        data = text.encode("utf-8", "surrogatepass")[:MAX_BYTES]
        if rng.random() < 0.1:
            data = mutated_bytes(rng, data)
        return f"POST {path}{' -' if rng.random() < 0.02 else ''}\n".encode() + data

    def _body(self, rng: random.Random, path: str) -> dict[str, Any]:
        fields = self.bodies[path]
        values = VALUES | next((own for prefix, own in DIALECTS.items() if path.startswith(prefix)), {})
        chosen = set(rng.sample(sorted(fields), min(len(fields), rng.choice([0, 1, 2, 4]))))
        return {
            name: rng.choice(values[name]) if name in values else self._sample(rng, schema)
            for name, schema in fields.items()
            if name in chosen or name in self.always
        }

    def _schema(self, schema: dict[str, Any]) -> dict[str, Any]:
        reference = schema.get("$ref", "")
        return self.schemas[reference.rpartition("/")[2]] if reference else schema

    def _sample(self, rng: random.Random, schema: dict[str, Any], depth: int = 0) -> Any:
        """A value of a schema's type, usually a valid one. Schemas may contain themselves."""
        schema = self._schema(schema)
        if depth > MAX_DEPTH:
            return None
        if "anyOf" in schema:
            return self._sample(rng, rng.choice(schema["anyOf"]), depth + 1)
        if "enum" in schema:
            return rng.choice(schema["enum"])
        match schema.get("type"):
            case "integer":
                return rng.choice([schema.get("minimum", 1), schema.get("maximum", 3)])
            case "number":
                return schema.get("maximum", 0.5)
            case "boolean":
                return rng.random() < 0.5
            case "string":
                return "x"
            case "array":
                return [self._sample(rng, schema.get("items", {}), depth + 1)]
            case "object":
                properties = schema.get("properties", {})
                return {name: self._sample(rng, inner, depth + 1) for name, inner in properties.items()}
            case _:
                return rng.choice([word for word in NASTY if not isinstance(word, Raw)])

    def check(self, data: bytes) -> None:
        self.server.ensure()
        line, _, body = data.partition(b"\n")
        method, path, *without_key = line.decode().split(" ")
        headers = {"Content-Type": "application/json", "X-Request-Id": f"fuzz-{hashlib.sha256(data).hexdigest()[:8]}"}
        if without_key:
            headers["Authorization"] = ""
        try:
            status, response_headers, response = self.server.request(method, path, body, headers)
        except TimeoutError:
            raise AssertionError("no response in time") from None
        except (OSError, http.client.HTTPException) as error:
            self.server.assert_alive()
            raise AssertionError(f"no response: {error!r}") from None
        if status >= 500 and status != 504 and not (status == 503 and "retry-after" in response_headers):
            raise AssertionError(f"{status}: {response!r}\n{self.server.log()[-1500:]}")
        assert b"root:x:0" not in response, "the response contains a file of the server"
        if status >= 400 and method != "HEAD":
            _assert_error(response, path)
        elif response_headers.get("content-type", "").startswith("text/event-stream"):
            _assert_events(response, path)
        if without_key and path not in OPEN and method != "OPTIONS":
            assert status >= 400, f"served without a key: {status}"
        if status >= 500:
            self.server.assert_alive()


class PoolingTarget(HttpTarget):
    """A model that embeds: its routes are others, and those that generate refuse."""

    name = "pooling"
    always = POOLING_ALWAYS

    def __init__(self) -> None:
        super().__init__()
        self.server.flags = ("--runner", "pooling", "--hf-overrides", '{"is_matryoshka": true}')


def _assert_error(response: bytes, path: str) -> None:
    """OpenAI's shape, or Anthropic's."""
    names = {"message", "type"} if _is_anthropic(path) else {"message", "type", "param", "code"}
    try:
        error = json.loads(response)["error"]
        assert isinstance(error["message"], str) and isinstance(error["type"], str)
        assert error.keys() == names
    except (ValueError, KeyError, TypeError, AssertionError):
        raise AssertionError(f"not an error of this API's shape: {response[:300]!r}") from None
    assert len(response) < 10_000, f"an error of {len(response)} bytes"
    assert not INTERNAL.search(error["message"]), f"an error that exposes internals: {error['message']}"


def _is_anthropic(path: str) -> bool:
    return (path.partition("?")[0] + "/").startswith("/v1/messages/")


def _assert_events(response: bytes, path: str) -> None:
    if path.startswith(("/v1/responses", "/v1/messages")):
        last = response.rstrip().rpartition(b"\n\n")[2]
        ends = (b"event: response.completed", b"event: response.incomplete", b"event: response.failed")
        ends += (b"event: message_stop", b"event: error")
        assert last.startswith(ends), f"a stream without an end: {response[-300:]!r}"
        assert b"internal error" not in last, last
        return
    assert response.endswith(b"data: [DONE]\n\n"), f"a stream without an end: {response[-300:]!r}"
    for event in response.split(b"\n\n"):
        if event.startswith(b'data: {"error"'):
            _assert_error(event.removeprefix(b"data: "), path)
            assert json.loads(event.removeprefix(b"data: "))["error"]["code"] is not None, event
