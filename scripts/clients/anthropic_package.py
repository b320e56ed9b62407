"""Anthropic's own package: python anthropic_package.py URL."""

import json
import sys
from typing import Any

import anthropic
from steps import run_steps

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="unused", max_retries=0, timeout=300)
MODEL = client.models.list().data[0].id
ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"name": "get_weather", "description": "Weather in a city", "input_schema": SCHEMA},
    {"name": "get_time", "description": "Time in a city", "input_schema": SCHEMA},
]
ANSWER: dict[str, Any] = {"model": MODEL, "max_tokens": 48}


def whole() -> None:
    """messages.create with a system prompt"""
    message = client.messages.create(messages=ASKED, system="You are brief.", **ANSWER)
    assert message.content[0].text and message.stop_reason in ("end_turn", "max_tokens")
    assert message.usage.output_tokens > 0


def streamed() -> None:
    """messages.stream: text_stream and get_final_message"""
    with client.messages.stream(messages=ASKED, **ANSWER) as stream:
        text = "".join(stream.text_stream)
        assert stream.get_final_message().content[0].text == text != ""


def counted() -> None:
    """messages.count_tokens equals the usage"""
    usage = client.messages.create(messages=ASKED, **ANSWER).usage
    prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert client.messages.count_tokens(model=MODEL, messages=ASKED).input_tokens == prompt


def tools() -> None:
    """two tools, forced one after the other, whole and streamed, their results sent back"""
    asked = list(ASKED)
    for name, result in (("get_weather", "sunny"), ("get_time", "noon")):
        forced: Any = {"type": "tool", "name": name}
        with client.messages.stream(messages=asked, tools=TOOLS, tool_choice=forced, **ANSWER) as stream:
            message = stream.get_final_message()
        (call,) = message.content
        assert call.name == name and call.input["city"] in ("Paris", "Rome") and message.stop_reason == "tool_use"
        again = client.messages.create(messages=asked, tools=TOOLS, tool_choice=forced, **ANSWER)
        assert again.content[0].name == name
        back = {"type": "tool_result", "tool_use_id": call.id, "content": result}
        asked += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [back]}]
    answer = client.messages.create(messages=asked, tools=TOOLS, tool_choice={"type": "none"}, **ANSWER)
    assert answer.content[0].text


def any_tool() -> None:
    """tool_choice any"""
    message = client.messages.create(messages=ASKED, tools=TOOLS, tool_choice={"type": "any"}, **ANSWER)
    assert all(block.type == "tool_use" for block in message.content)


def schema() -> None:
    """output_config with a JSON schema"""
    config: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    message = client.messages.create(messages=ASKED, output_config=config, **ANSWER)
    assert json.loads(message.content[0].text)["city"] in ("Paris", "Rome")


def thinking() -> None:
    """thinking enabled and disabled"""
    for wanted in ({"type": "enabled", "budget_tokens": 16}, {"type": "disabled"}):
        assert client.messages.create(messages=ASKED, thinking=wanted, **ANSWER).content  # type: ignore[call-overload]


async def asynchronous() -> None:
    """AsyncAnthropic, a stream that is closed early"""
    async with anthropic.AsyncAnthropic(base_url=sys.argv[1], api_key="unused", max_retries=0) as one:
        async with one.messages.stream(messages=ASKED, **ANSWER) as stream:
            async for _ in stream.text_stream:
                break
        assert (await one.messages.create(messages=ASKED, **ANSWER)).content


def errors() -> None:
    """NotFoundError, and BadRequestError for an image"""
    image: Any = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}]
    for kind, fields in (
        (anthropic.NotFoundError, {"model": "gpt", "messages": ASKED}),
        (anthropic.BadRequestError, {"model": MODEL, "messages": image}),
    ):
        try:
            client.messages.create(max_tokens=5, **fields)
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__}")


run_steps((whole, streamed, counted, tools, any_tool, schema, thinking, asynchronous, errors))
