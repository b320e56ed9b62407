"""Functions and questions of a public benchmark: every forced response of a small model is a valid call."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.entrypoints.server_process import ServerProcess

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "data/bfcl_sample.json").read_text())["cases"]
# As the benchmark itself translates its types for OpenAI's API; what is not here, "any" for one, is a string.
TYPES = {name: name for name in ("integer", "number", "string", "boolean", "array", "object")}
TYPES |= {"float": "number", "double": "number", "bool": "boolean", "dict": "object", "HashMap": "object"}
TYPES |= {name: "array" for name in ("list", "tuple", "Array", "ArrayList", "Queue", "Stack")}
TYPES |= {name: "integer" for name in ("byte", "short", "long", "Bigint")}


def translated(schema: dict[str, Any]) -> dict[str, Any]:
    made = schema | {"type": TYPES.get(schema.get("type", ""), "string")}
    if schema.get("type") == "float":
        made["format"] = "float"
    if isinstance(schema.get("properties"), dict):
        made["properties"] = {name: translated(part) for name, part in schema["properties"].items()}
    if "items" in schema:
        made["items"] = translated(schema["items"])
    return made


def limited(schema: dict[str, Any]) -> dict[str, Any]:
    """With limits on everything that a model could generate without end."""
    made = dict(schema)
    if schema["type"] == "string" and "enum" not in schema:
        made["maxLength"] = 16
    if schema["type"] == "array":
        made["maxItems"] = 2
        made["items"] = limited(schema["items"]) if "items" in schema else {"type": "integer", "maximum": 99}
    if schema["type"] == "object":
        made["properties"] = {name: limited(part) for name, part in schema.get("properties", {}).items()}
        made["additionalProperties"] = False
    if schema["type"] in ("integer", "number") and "enum" not in schema:
        made = {"type": "integer", "minimum": -(10**9), "maximum": 10**9}
    return made


def tools_of(case: dict[str, Any], with_limits: bool) -> list[dict[str, Any]]:
    tools = []
    for function in case["function"]:
        parameters = translated(function["parameters"])
        parameters = limited(parameters) if with_limits else parameters
        tools.append({"type": "function", "function": function | {"parameters": parameters}})
    return tools


def asked(server: ServerProcess, case: dict[str, Any], tools: Any, **fields: Any) -> Any:
    fields = {"temperature": 0.7, "seed": 1, "tool_choice": "required"} | fields
    client = server.client()
    return client.chat.completions.create(model="tiny", messages=case["question"], tools=tools, **fields).choices[0]


def check(call: Any, tools: Any) -> None:
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])


def test_the_sample() -> None:
    assert len(CASES) >= 58 and len({case["id"] for case in CASES}) == len(CASES)
    kinds = {re.sub(r"_[\d-]+$", "", case["id"]) for case in CASES}
    assert {"simple_python", "multiple", "parallel", "parallel_multiple", "live_simple", "simple_java"} <= kinds


@pytest.mark.slow
def test_every_response_is_a_valid_call(smollm: ServerProcess) -> None:
    """The offered schemas have limits, so every response finishes."""

    def ask(job: tuple[int, dict[str, Any]]) -> tuple[Any, Any, str | None]:
        place, case = job
        tools = tools_of(case, with_limits=True)
        name = tools[-1]["function"]["name"] if place % 4 == 0 else None
        choice: Any = "required" if name is None else {"type": "function", "function": {"name": name}}
        response = asked(smollm, case, tools, tool_choice=choice, parallel_tool_calls=False, max_tokens=700)
        return response, tools, name

    with ThreadPoolExecutor(12) as pool:
        responses = list(pool.map(ask, enumerate(CASES)))
    for response, tools, name in responses:
        (call,) = response.message.tool_calls
        assert response.finish_reason == ("tool_calls" if name is None else "stop"), call
        assert name in (None, call.function.name) and response.message.content == ""
        check(call, tools)


@pytest.mark.slow
def test_unlimited_responses_are_valid_or_truncated(smollm: ServerProcess) -> None:
    """A truncated response has finish_reason length; complete calls before that are valid."""

    def ask(case: dict[str, Any]) -> tuple[Any, Any]:
        tools = tools_of(case, with_limits=False)
        return asked(smollm, case, tools, max_tokens=80), tools

    cases = CASES[::3]
    with ThreadPoolExecutor(12) as pool:
        responses = list(pool.map(ask, cases))
    ended = 0
    for response, tools in responses:
        calls = response.message.tool_calls or []
        if response.finish_reason == "length":
            calls = calls[:-1]
        else:
            assert response.finish_reason == "tool_calls" and calls
            ended += 1
        for call in calls:
            check(call, tools)
    assert ended >= 3  # or nothing was shown
