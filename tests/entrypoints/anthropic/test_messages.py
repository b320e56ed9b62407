"""/v1/messages as Anthropic's own client sees it, from a scripted engine."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from quire.config.server import ServerConfig
from tests.entrypoints.openai.test_parsed_chat import say, says
from tests.entrypoints.stub_server import MODEL, StubServer, stub_engine, stub_server

anthropic = pytest.importorskip("anthropic")

HELLO: Any = [{"role": "user", "content": "Hello"}]
TOOL: Any = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def keyed() -> Iterator[StubServer]:
    with stub_server(stub_engine(), api_keys=("key",)) as one:
        yield one


@pytest.fixture(scope="module")
def thinker() -> Iterator[StubServer]:
    with stub_server(says(""), ServerConfig(reasoning_parser="qwen3", tool_call_parser="hermes")) as one:
        yield one


def client(server: StubServer, key: str = "key") -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=20)


def refusal(response: httpx.Response, status: int = 400, kind: str = "invalid_request_error") -> str:
    """The message of an error of Anthropic's shape."""
    assert response.status_code == status, response.text
    shape = response.json()
    assert shape.keys() == {"type", "error"} and shape["type"] == "error" and shape["error"]["type"] == kind
    return str(shape["error"]["message"])


def test_a_text_whole_and_streamed(keyed: StubServer) -> None:
    asked = {"model": MODEL, "max_tokens": 50, "messages": HELLO, "stop_sequences": [" twelve"]}
    whole = client(keyed).messages.create(**asked)
    assert (whole.role, whole.stop_reason, whole.stop_sequence) == ("assistant", "stop_sequence", " twelve")
    with client(keyed).messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.content[0].text == text == whole.content[0].text and final.usage == whole.usage
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", " twelve")


def test_the_order_of_events(keyed: StubServer) -> None:
    events = list(client(keyed).messages.create(model=MODEL, max_tokens=2, messages=HELLO, stream=True))
    kinds = [event.type for event in events]
    delta = "content_block_delta"
    ending = ["content_block_stop", "message_delta", "message_stop"]
    assert kinds == ["message_start", "content_block_start", delta, delta, *ending]
    assert events[-2].delta.stop_reason == "max_tokens" and events[-2].usage.output_tokens == 2
    start, end = events[0].message.usage, events[-2].usage
    read, written = end.cache_read_input_tokens, end.cache_creation_input_tokens
    assert start.output_tokens == 0 and start.input_tokens == end.input_tokens + read + written
    raw = keyed.post(
        "/v1/messages", {"max_tokens": 2, "messages": HELLO, "stream": True}, headers={"x-api-key": "key"}
    ).text
    assert 'event: ping\ndata: {"type":"ping"}\n\n' in raw


def test_system_and_blocks_reach_the_prompt(keyed: StubServer) -> None:
    conversation = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    fields = {"model": MODEL, "messages": conversation, "tools": [TOOL]}
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    body = {**fields, "system": system, "max_tokens": 5}
    rendered = keyed.post("/v1/messages/render", body, headers={"x-api-key": "key"}).json()
    prompt = keyed.engine.tokenizer.decode(rendered["token_ids"])
    assert all(text in prompt for text in ("Be\nbrief.", "Weather?", "I look.", "Oslo", "sunny", "And?"))
    count = client(keyed).messages.count_tokens(**fields, system=system)
    assert count.input_tokens == len(rendered["token_ids"])


def test_an_answer_that_has_begun_is_continued(keyed: StubServer) -> None:
    body = {"max_tokens": 2, "messages": [*HELLO, {"role": "assistant", "content": "I am"}]}
    rendered = keyed.post("/v1/messages/render", body, headers={"x-api-key": "key"}).json()
    assert keyed.engine.tokenizer.decode(rendered["token_ids"]).endswith("I am")


def test_thinking_and_tools(thinker: StubServer) -> None:
    say(thinker.engine, f"<think>Hm, Oslo.</think>\n\n{CALL}")
    asked = {"model": MODEL, "max_tokens": 200, "messages": HELLO, "tools": [TOOL]}
    whole = client(thinker).messages.create(**asked)
    thinking, call = whole.content
    assert thinking.type == "thinking" and thinking.thinking == "Hm, Oslo." and thinking.signature
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Oslo"})
    assert whole.stop_reason == "tool_use"
    with client(thinker).messages.stream(**asked) as stream:
        kinds = {event.delta.type for event in stream if event.type == "content_block_delta"}
        final = stream.get_final_message()
    assert kinds == {"thinking_delta", "signature_delta", "input_json_delta"} and final.stop_reason == "tool_use"
    assert final.content[0] == thinking and final.content[1].input == call.input
    back = [*HELLO, {"role": "assistant", "content": [block.model_dump() for block in whole.content]}]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    say(thinker.engine, "It is sunny.")
    again = client(thinker).messages.create(**asked | {"messages": [*back, {"role": "user", "content": [result]}]})
    assert again.content[0].text == "It is sunny." and again.stop_reason == "end_turn"


def test_thinking_that_is_switched_off(thinker: StubServer) -> None:
    say(thinker.engine, "<think>Hm.</think>Yes.")
    off = {"type": "disabled"}
    message = client(thinker).messages.create(model=MODEL, max_tokens=50, messages=HELLO, thinking=off)
    assert [block.type for block in message.content] == ["text"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_forced_tools(thinker: StubServer, choice: Any) -> None:
    named = choice["type"] == "tool"
    say(thinker.engine, '{"city": "Rome"}' if named else '[{"name": "get_weather", "parameters": {"city": "Rome"}}]')
    fields = {"model": MODEL, "max_tokens": 50, "messages": HELLO, "tools": [TOOL], "tool_choice": choice}
    (call,) = client(thinker).messages.create(**fields).content
    assert call.input == {"city": "Rome"}


def test_a_schema(keyed: StubServer) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}}
    body = {"max_tokens": 9, "messages": HELLO, "output_config": {"format": {"type": "json_schema", "schema": schema}}}
    rendered = keyed.post("/v1/messages/render", body, headers={"x-api-key": "key"}).json()
    assert json.loads(rendered["sampling_params"]["structured_outputs"]["json"]) == schema


def test_keys_in_either_header(keyed: StubServer) -> None:
    body = {"max_tokens": 2, "messages": HELLO}
    bearer, own = {"Authorization": "Bearer key"}, {"x-api-key": "key"}
    for headers in (bearer, own, bearer | {"x-api-key": "other"}):
        assert keyed.post("/v1/messages", body, headers=headers).status_code == 200
    for headers in ({}, {"x-api-key": ""}, {"x-api-key": "other"}, {"Authorization": "Basic key"}):
        assert "key" in refusal(keyed.post("/v1/messages", body, headers=headers), 401, "authentication_error")
    with pytest.raises(anthropic.AuthenticationError):
        client(keyed, "other").messages.create(model=MODEL, **body)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"messages": []}, "empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role is 'robot'; allowed: user"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content must be"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "images are not available yet"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document'; allowed: text, tool_result"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "'tool_use'; allowed: text, tool_result"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1"}]}]}, ".name must be a string"),
        ({"system": [{"type": "image"}]}, "system[0].type is 'image'"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type is 'bash_20250124'; allowed: custom"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type is 'some'; allowed: auto, any, none, tool"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name is required"),
        ({"thinking": {"type": "much"}}, "thinking.type is 'much'; allowed"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "less than max_tokens"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type is 'xml'"),
        ({"stop_sequences": ["x"] * 100}, "stop_sequences has 100 entries"),
        ({"temperature": -1}, "temperature is -1"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
    ],
)
def test_mistakes_are_explained_in_its_own_shape(server: StubServer, fields: dict[str, Any], message: str) -> None:
    body = {"max_tokens": 5, "messages": HELLO} | fields
    for stream in (False, True):
        assert message in refusal(server.post("/v1/messages", body | {"stream": stream}))


def test_other_errors_have_its_shape_too(server: StubServer) -> None:
    body = {"max_tokens": 5, "messages": HELLO}
    assert "gpt" in refusal(server.post("/v1/messages", body | {"model": "gpt"}), 404, "not_found_error")
    assert "no such path" in refusal(server.post("/v1/messages/batches", body), 404, "not_found_error")
    long = [{"role": "user", "content": "hi " * 9000}]
    assert "tokens" in refusal(server.post("/v1/messages", body | {"messages": long}))
    assert "tokens" in refusal(server.post("/v1/messages/count_tokens", {"messages": long}))
    deep = b'{"max_tokens": 1, "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    refusal(httpx.post(f"{server.url}/v1/messages", content=deep, headers={"Content-Type": "application/json"}))


def test_a_disconnect_frees_the_request(slow: StubServer) -> None:
    body = {"max_tokens": 5000, "messages": HELLO, "stream": True}
    with httpx.stream("POST", f"{slow.url}/v1/messages", json=body, timeout=20) as response:
        next(response.iter_lines())
    slow.wait_until(lambda: not slow.engine.running and not slow.server.context.jobs)


def test_a_deadline_ends_a_stream_with_an_error() -> None:
    config = ServerConfig(request_timeout=0.3, sse_keep_alive_interval=0.05)
    with stub_server(stub_engine(0.01), config) as server:
        body = {"max_tokens": 5000, "messages": HELLO, "stream": True}
        last = server.post("/v1/messages", body).text.strip().split("\n\n")[-1]
        event, data = last.split("\n")
        assert event == "event: error" and json.loads(data.removeprefix("data: "))["error"]["type"] == "timeout_error"
        with pytest.raises(anthropic.APIStatusError):
            list(client(server).messages.create(model=MODEL, **body))
