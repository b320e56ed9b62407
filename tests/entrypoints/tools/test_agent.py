"""An agent's exchange with a real server that was started without flags for tools or reasoning."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.entrypoints.server_process import ServerProcess, server_process

NOW: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TOOLS: Any = [NOW, {"type": "function", "function": {"name": "now", "description": "The time"}}]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
ASKED: Any = {"role": "user", "content": "What is the weather in Oslo?"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ("--served-model-name", "tiny", "--num-gpu-blocks-override", "512", "--max-model-len", "1024")
    with server_process(tmp_path_factory.mktemp("agent"), *flags) as one:
        yield one


def completion(client: openai.OpenAI, stream: bool, **fields: Any) -> dict[str, Any]:
    """The message of a response, as it goes back into the history, with the finish reason."""
    fields = {"model": "tiny", "tools": TOOLS, "temperature": 0, "max_tokens": 48} | fields
    if not stream:
        choice = client.chat.completions.create(**fields).choices[0]
        return choice.message.to_dict() | {"finish_reason": choice.finish_reason}
    message: dict[str, Any] = {"role": "assistant", "content": "", "finish_reason": None}
    for chunk in client.chat.completions.create(stream=True, **fields):
        (part,) = chunk.choices
        message["content"] += part.delta.content or ""
        message["finish_reason"] = part.finish_reason or message["finish_reason"]
        for delta in part.delta.tool_calls or []:
            calls = message.setdefault("tool_calls", [])
            if delta.id:
                calls.append({"id": delta.id, "type": delta.type, "function": {"name": delta.function.name}})
            function = calls[delta.index]["function"]
            function["arguments"] = function.get("arguments", "") + delta.function.arguments
    return message


def test_the_choice_is_said_at_the_start(server: ServerProcess) -> None:
    assert "tool calls: json, reasoning: none" in server.log.read_text()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_and_its_result(server: ServerProcess, choice: Any, stream: bool) -> None:
    client = server.client()
    asked = {"tool_choice": choice, "parallel_tool_calls": False}
    message = completion(client, stream, messages=[ASKED], **asked)
    assert message.pop("finish_reason") == ("tool_calls" if choice == "required" else "stop")
    (call,) = message["tool_calls"]
    expected = {"get_weather": {"city"}, "now": set()}[call["function"]["name"]]
    assert set(json.loads(call["function"]["arguments"])) == expected
    result = {"role": "tool", "tool_call_id": call["id"], "content": "4 degrees, rain"}
    after = completion(client, stream, messages=[ASKED, message, result])
    assert after.get("content") or after.get("tool_calls")


@pytest.mark.parametrize("choice", ["auto", "none", openai.omit])
def test_the_model_decides(server: ServerProcess, choice: Any) -> None:
    one, other = (completion(server.client(), stream, messages=[ASKED], tool_choice=choice) for stream in (False, True))
    assert one.get("content") or one.get("tool_calls")
    assert choice != "none" or "tool_calls" not in one
    assert (one["content"] or "", one["finish_reason"]) == (other["content"], other["finish_reason"])
    called, streamed = ([call["function"] for call in message.get("tool_calls", [])] for message in (one, other))
    assert called == streamed
