"""Calls that a real, small model is made to write."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema

from tests.entrypoints.openai.processes import serving

PLACE = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a place",
            "parameters": {
                "type": "object",
                "properties": {"place": {"$ref": "#/$defs/place"}, "days": {"enum": [1, 3, 7]}},
                "required": ["place", "days"],
                "additionalProperties": False,
                "$defs": {"place": PLACE | {"additionalProperties": False}},
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "The time"}},
    {
        "type": "function",
        "function": {
            "name": "math.add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    },
]
SCHEMAS = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in TOOLS}
QUESTIONS = ["What is the weather in Oslo?", "What time is it?", "Add 17 and true.", "Hello!", "東京の天気は？"]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


def test_forced_calls_are_valid(tmp_path: Path) -> None:
    flags = ("--served-model-name", "tiny", "--num-gpu-blocks-override", "512")
    with serving(tmp_path, *flags) as server:
        client = server.client()

        def ask(job: tuple[int, Any]) -> tuple[Any, Any]:
            seed, choice = job
            messages: Any = [{"role": "user", "content": QUESTIONS[seed % len(QUESTIONS)]}]
            fields: Any = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
            fields |= {"seed": seed, "temperature": 1.3, "max_tokens": 200}
            whole = client.chat.completions.create(model="tiny", messages=messages, **fields)
            with client.chat.completions.stream(model="tiny", messages=messages, **fields) as stream:
                return whole.choices[0], stream.get_final_completion().choices[0]

        jobs = [(seed, choice) for seed in range(5) for choice in ("required", NAMED)]
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(ask, jobs))

    for (_, choice), (whole, streamed) in zip(jobs, answers, strict=True):
        (call,) = whole.message.tool_calls
        assert whole.finish_reason == ("tool_calls" if choice == "required" else "stop") == streamed.finish_reason
        assert whole.message.content is None and (choice == "required" or call.function.name == "get_weather")
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
        (again,) = streamed.message.tool_calls
        assert (again.function.name, again.function.arguments) == (call.function.name, call.function.arguments)
