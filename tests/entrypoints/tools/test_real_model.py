"""Forced calls of a real, small model."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema

from tests.entrypoints.server_process import ServerProcess

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


def test_forced_calls_are_valid(smollm: ServerProcess) -> None:
    client = smollm.client()

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
        responses = list(pool.map(ask, jobs))

    for (_, choice), (whole, streamed) in zip(jobs, responses, strict=True):
        (call,) = whole.message.tool_calls
        assert whole.finish_reason == ("tool_calls" if choice == "required" else "stop") == streamed.finish_reason
        assert whole.message.content == "" and (choice == "required" or call.function.name == "get_weather")
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
        (again,) = streamed.message.tool_calls
        assert (again.function.name, again.function.arguments) == (call.function.name, call.function.arguments)


def test_a_whole_conversation_on_auto(smollm: ServerProcess) -> None:
    """The model continues after a call and its result; its text is content, streamed or not."""
    client = smollm.client()
    history: Any = [
        {"role": "user", "content": "What is the weather in Oslo?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "4 °C"},
    ]
    fields: Any = {"model": "tiny", "messages": history, "tools": TOOLS, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**fields).choices[0]
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**fields, stream=True)]
    assert whole.message.content == "".join(one.delta.content or "" for one in chunks) != ""
    assert whole.finish_reason == chunks[-1].finish_reason and not whole.message.tool_calls
    none = client.chat.completions.create(**fields, tool_choice="none").choices[0]
    assert none.message.content and none.message.tool_calls is None


def test_no_additional_arguments(smollm: ServerProcess) -> None:
    """A schema that allows additional properties does not make a model invent some."""
    open_schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}}}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": open_schema}}
    messages: Any = [{"role": "user", "content": "Make up many arguments."}]
    fields: Any = {"tools": [tool], "tool_choice": "required", "temperature": 2.0, "max_tokens": 60, "n": 8, "seed": 4}
    fields["parallel_tool_calls"] = False
    for choice in smollm.client().chat.completions.create(model="tiny", messages=messages, **fields).choices:
        (call,) = choice.message.tool_calls or []
        assert json.loads(call.function.arguments).keys() <= {"a"} and choice.finish_reason == "tool_calls"
