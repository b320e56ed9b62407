"""An agent with two tools, on a real server whose two API processes share the store; by the official clients."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from tests.entrypoints.server_process import SECONDS, ServerProcess, eventually, server_process

MODEL = "tiny"
CITY = {"type": "string", "enum": ["Oslo", "Rome"]}
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather in a city",
    "strict": True,
    "parameters": {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False},
}
CLOCK: Any = {
    "type": "function",
    "name": "get_time",
    "description": "Time in a city",
    "parameters": {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False},
}
RESULTS = {"get_weather": "sunny", "get_time": "noon"}


class Report(BaseModel):
    sky: str = Field(max_length=10)
    warm: bool


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ("--served-model-name", MODEL, "--num-gpu-blocks-override", "512", "--max-model-len", "1024")
    keys = ("--api-key", "mine", "--api-key", "yours", "--enable-admin")
    with server_process(tmp_path_factory.mktemp("agent"), "--api-server-count", "2", *flags, *keys) as one:
        yield one


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return server.client(api_key="mine")


def idle(server: ServerProcess) -> bool:
    headers = {"Authorization": "Bearer mine"}
    state = server.get("/server_info", headers=headers).json()["state"]["core"]
    return not state["requests"] and state["blocks_free"] == state["blocks"]


def test_an_agent_loop_with_two_tools(client: openai.OpenAI) -> None:
    """Each turn names its tool, so that a small model calls it; the last answers."""
    fields: Any = {"model": MODEL, "tools": [WEATHER, CLOCK], "temperature": 0, "max_output_tokens": 64}
    given: Any = "Weather and time in Oslo?"
    previous: str | None = None
    for name in ("get_weather", "get_time"):
        choice: Any = {"type": "function", "name": name}
        with client.responses.stream(
            input=given, previous_response_id=previous, tool_choice=choice, **fields
        ) as stream:
            pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
            response = stream.get_final_response()
        (call,) = response.output
        assert call.type == "function_call" and call.name == name and "".join(pieces) == call.arguments
        assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
        given = [{"type": "function_call_output", "call_id": call.call_id, "output": RESULTS[name]}]
        previous = response.id
    answer = client.responses.create(input=given, previous_response_id=previous, tool_choice="none", **fields)
    assert answer.output_text and answer.usage is not None
    again = client.responses.create(input=given, previous_response_id=previous, tool_choice="none", **fields)
    assert again.output_text == answer.output_text
    assert again.usage is not None and again.usage.input_tokens_details.cached_tokens > 0


def test_required_calls_and_a_schema(client: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "input": "Oslo?", "temperature": 0, "max_output_tokens": 120}
    called = client.responses.create(tools=[WEATHER, CLOCK], tool_choice="required", **fields)
    assert called.output and {item.type for item in called.output} == {"function_call"}
    parsed = client.responses.parse(text_format=Report, **fields)
    assert isinstance(parsed.output_parsed, Report)


def test_both_processes_see_one_store(server: ServerProcess) -> None:
    """Of twenty connections, each process accepts some."""
    body = {"input": "Hi", "max_output_tokens": 2}
    headers = {"Authorization": "Bearer mine"}
    id = server.post("/v1/responses", body, headers=headers).json()["id"]
    for _ in range(20):
        assert server.get(f"/v1/responses/{id}", headers=headers).json()["id"] == id
        assert server.get(f"/v1/responses/{id}", headers={"Authorization": "Bearer yours"}).status_code == 404


def test_a_background_response_is_cancelled_from_any_process(server: ServerProcess) -> None:
    client = server.client(api_key="mine")
    long: Any = {"model": MODEL, "input": "Hi", "max_output_tokens": 900, "extra_body": {"ignore_eos": True}}
    ids = [client.responses.create(background=True, **long).id for _ in range(4)]
    for id in ids:
        assert server.client(api_key="mine").responses.cancel(id).status == "cancelled"
    eventually(lambda: idle(server), 30)
    short = {**long, "max_output_tokens": 4}
    done = client.responses.create(background=True, **short).id
    eventually(lambda: server.client(api_key="mine").responses.retrieve(done).status == "incomplete")
    events = list(client.responses.create(background=True, stream=True, **short))
    again = list(server.client(api_key="mine").responses.retrieve(events[0].response.id, stream=True))
    assert again == events and again[-1].type == "response.incomplete"


def test_a_disconnect_frees_the_blocks(server: ServerProcess) -> None:
    body = {"input": "Hi", "max_output_tokens": 900, "ignore_eos": True, "stream": True}
    headers = {"Authorization": "Bearer mine"}
    with httpx.stream("POST", f"{server.url}/v1/responses", json=body, headers=headers, timeout=SECONDS) as response:
        next(response.iter_lines())
    eventually(lambda: idle(server), 30)


def test_messages_with_anthropics_client(server: ServerProcess) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=server.url, api_key="mine", max_retries=0)
    tool = {"name": "get_weather", "description": "Weather", "input_schema": WEATHER["parameters"]}
    asked: list[Any] = [{"role": "user", "content": "Weather in Oslo?"}]
    fields = {"model": MODEL, "max_tokens": 64, "tools": [tool]}
    forced = {"type": "tool", "name": "get_weather"}
    with client.messages.stream(messages=asked, tool_choice=forced, **fields) as stream:
        message = stream.get_final_message()
    (call,) = message.content
    assert call.type == "tool_use" and call.input["city"] in ("Oslo", "Rome") and message.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    asked += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(messages=asked, tool_choice={"type": "none"}, **fields)
    assert answer.content[0].text
    count = client.messages.count_tokens(model=MODEL, messages=asked, tools=[tool], tool_choice={"type": "none"})
    usage = answer.usage
    prompt = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    assert count.input_tokens == prompt
