"""Tool calls as the official client sees them, from a scripted engine."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from quire.bench.internal.stub_engine import StubEngine, cycle
from quire.config.server import ServerConfig
from quire.messages.requests import EngineCoreRequest
from tests.entrypoints.stub_server import MODEL, StubServer, stub_server
from tests.entrypoints.tools.parsed import TOOLS
from tests.entrypoints.tools.rendered import WRITERS, Call
from tests.entrypoints.tools.test_formats import CASES

HELLO: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
OFFERED: Any = TOOLS
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
CALLS = '[{"name": "get_weather", "parameters": {"city": "Zürich"}}, {"name": "now", "parameters": {}}]'


def engine_that_says(text: str) -> StubEngine:
    engine = StubEngine(cycle([0]))
    say(engine, text)
    return engine


def say(engine: StubEngine, text: str) -> None:
    assert engine.tokenizer is not None
    ids = [*engine.tokenizer.encode(text, add_special_tokens=False), engine.config.model.eos_token_ids[0]]

    def rule(request: EngineCoreRequest, count: int) -> int:
        return ids[min(count, len(ids) - 1)]

    engine.rule = rule


def whole(server: StubServer, **kwargs: Any) -> Any:
    return server.client().chat.completions.create(model=MODEL, messages=HELLO, tools=OFFERED, **kwargs).choices[0]


def streamed(server: StubServer, **kwargs: Any) -> tuple[Any, list[Any]]:
    """The response that the client assembles, and the deltas of its calls."""
    client = server.client()
    deltas = []
    with client.chat.completions.stream(model=MODEL, messages=HELLO, tools=OFFERED, **kwargs) as stream:
        for event in stream:
            if event.type == "chunk" and event.chunk.choices:
                deltas += event.chunk.choices[0].delta.tool_calls or []
        return stream.get_final_completion().choices[0], deltas


def calls(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]


@pytest.fixture(scope="module")
def server() -> Iterator[StubServer]:
    with stub_server(
        engine_that_says(""), ServerConfig(enable_auto_tool_choice=True, tool_call_parser="hermes")
    ) as one:
        yield one


@pytest.mark.parametrize("name", ["hermes, text before", "hermes, two", "hermes, nested", "hermes, plain"])
def test_auto(server: StubServer, name: str) -> None:
    case = CASES[name]
    say(server.engine, case.text)
    response = whole(server)
    assert [(name, json.loads(arguments)) for name, arguments in calls(response)] == case.calls
    assert (response.message.content or "") == case.content
    assert response.finish_reason == ("tool_calls" if case.calls else "stop")
    together, deltas = streamed(server)
    assert calls(together) == calls(response) and together.finish_reason == response.finish_reason
    assert (together.message.content or "") == case.content
    for delta in deltas:
        first = delta.id is not None
        assert (delta.type == "function", delta.function.name is not None) == (first, first)
        assert delta.function.arguments == "" or not first


def events(server: StubServer, **fields: Any) -> list[Any]:
    """The choices of a stream, undecoded by the client."""
    body = {"messages": HELLO, "tools": OFFERED, "stream": True, **fields}
    lines = server.post("/v1/chat/completions", body).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]


@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
def test_what_is_on_the_wire(server: StubServer, choice: Any) -> None:
    """OpenAI's schema, key by key."""
    texts = {"auto": CASES["hermes, two"].text, "required": CALLS}
    say(server.engine, texts[choice] if isinstance(choice, str) else '{"city": "Oslo"}')
    first, *between, last = events(server, tool_choice=choice)
    assert first["delta"] == {"role": "assistant", "content": ""} and first["finish_reason"] is None
    assert last["delta"] == {} and last["finish_reason"] == ("tool_calls" if isinstance(choice, str) else "stop")
    begun = 0
    for event in between:
        assert event["finish_reason"] is None and set(event["delta"]) == {"tool_calls"}
        (call,) = event["delta"]["tool_calls"]
        if "id" in call:
            assert set(call) == {"index", "id", "type", "function"} and call["type"] == "function"
            assert call["index"] == begun and set(call["function"]) == {"name", "arguments"}
            assert call["function"]["arguments"] == ""
            begun += 1
        else:
            assert set(call) == {"index", "function"} and call["index"] == begun - 1
            assert set(call["function"]) == {"arguments"} and call["function"]["arguments"]
    assert begun == (2 if isinstance(choice, str) else 1)


@pytest.mark.parametrize("format", WRITERS)
def test_the_clients_helper_rebuilds_the_whole_response(format: str) -> None:
    made: list[Call] = [("get_weather", {"city": 'Zürich "N" 🌧', "where": {"a": [1, None]}}), ("now", {})]
    config = ServerConfig(enable_auto_tool_choice=True, tool_call_parser=format)
    with stub_server(engine_that_says(WRITERS[format][0](made)), config) as one:
        response = whole(one)
        together, deltas = streamed(one)
    assert [(name, json.loads(arguments)) for name, arguments in calls(response)] == made
    assert calls(together) == calls(response) and together.finish_reason == response.finish_reason == "tool_calls"
    assert together.message.content in (None, "") and response.message.content is None
    assert len(deltas) >= 4 and [delta.index for delta in deltas if delta.id] == [0, 1]


def test_a_cut_call_ends_with_length(server: StubServer) -> None:
    say(server.engine, CASES["hermes"].text)
    response = whole(server, max_tokens=16)
    assert response.finish_reason == "length"


def test_one_call_only(server: StubServer) -> None:
    say(server.engine, CASES["hermes, two"].text)
    assert len(calls(whole(server, parallel_tool_calls=False))) == 1
    assert len(calls(streamed(server, parallel_tool_calls=False)[0])) == 1


def test_required(server: StubServer) -> None:
    say(server.engine, CALLS)
    response = whole(server, tool_choice="required")
    assert calls(response) == [("get_weather", '{"city": "Zürich"}'), ("now", "{}")]
    assert response.finish_reason == "tool_calls" and response.message.content == ""
    together, _ = streamed(server, tool_choice="required")
    assert calls(together) == calls(response) and together.finish_reason == "tool_calls"


def test_named(server: StubServer) -> None:
    say(server.engine, '{"city": "Oslo", "days": 3}')
    response = whole(server, tool_choice=NAMED)
    assert calls(response) == [("get_weather", '{"city": "Oslo", "days": 3}')]
    assert response.finish_reason == "stop" and response.message.content == ""
    together, deltas = streamed(server, tool_choice=NAMED)
    assert calls(together) == calls(response) and together.finish_reason == "stop"
    assert len(deltas) > 3


def test_a_conversation_with_results(server: StubServer) -> None:
    say(server.engine, CASES["hermes, two"].text)
    client = server.client()
    message = client.chat.completions.create(model=MODEL, messages=HELLO, tools=OFFERED).choices[0].message
    results: list[Any] = [
        {"role": "tool", "tool_call_id": call.id, "content": "4 °C"} for call in message.tool_calls or []
    ]
    say(server.engine, "It is cold.")
    history: Any = [*HELLO, message, *results]
    after = client.chat.completions.create(model=MODEL, messages=history, tools=OFFERED)
    assert after.choices[0].message.content == "It is cold." and after.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": 3}, "tools"),
        ({"tools": [{}], "extra_body": {"use_beam_search": True}}, "tools"),
    ],
)
def test_what_is_refused(server: StubServer, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        server.client().chat.completions.create(model=MODEL, messages=HELLO, **fields)
    assert error.value.param == param
