"""The HTTP calls that Open WebUI makes of a connection, with aiohttp as it uses it: python open_webui.py URL."""

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from steps import run_steps

URL = sys.argv[1] + "/v1"
HEADERS = {
    "Authorization": "Bearer ",  # the user left the key empty
    "Content-Type": "application/json",
    "X-OpenWebUI-User-Name": "Ada%20Lovelace",
    "X-OpenWebUI-User-Id": "7b0d1c",
    "X-OpenWebUI-User-Email": "ada@example.org",
    "X-OpenWebUI-User-Role": "admin",
    "X-OpenWebUI-Chat-Id": "c0ffee",
}
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20, "description": "name of the city"}},
            "required": ["city"],
        },
    },
}


@asynccontextmanager
async def post(body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
    async with aiohttp.ClientSession(trust_env=True) as session:
        model = (await (await session.get(f"{URL}/models", headers=HEADERS)).json())["data"][0]["id"]
        url, data = f"{URL}/chat/completions", json.dumps({"model": model, **body})
        async with session.post(url, data=data, headers=HEADERS) as response:
            assert response.status == 200, await response.text()
            yield response


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    assert "text/event-stream" in response.headers["Content-Type"]
    async for line in response.content:
        data = line.decode().removeprefix("data: ").strip()
        if data and data != "[DONE]" and not data.startswith(":"):
            yield json.loads(data)


async def connection() -> None:
    """Verify Connection and the list of models"""
    async with aiohttp.ClientSession() as session, session.get(f"{URL}/models", headers=HEADERS) as response:
        assert response.status == 200
        models = await response.json()
    assert models["object"] == "list" and all(model["object"] == "model" for model in models["data"])
    assert {"id", "created", "owned_by"} <= models["data"][0].keys()


async def chat() -> None:
    """a chat's stream with usage and the advanced parameters"""
    body = {
        "messages": [{"role": "system", "content": "You are brief."}, QUESTION],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.0,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
        "repeat_penalty": 1.1,
        "seed": 1,
        "stop": ["\n\n\n"],
        "max_tokens": 32,
        "reasoning_effort": "low",
    }
    text, usage = "", None
    async with post(body) as response:
        async for event in events(response):
            usage = event.get("usage") or usage
            text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    assert text and usage and usage["completion_tokens"] <= 32


async def stop_button() -> None:
    """the stop button: the connection is closed in the middle of a stream"""
    async with post({"messages": [QUESTION], "stream": True, "max_tokens": 2000}) as response:
        async for _ in events(response):
            break
    async with post({"messages": [QUESTION], "stream": False, "max_tokens": 1}) as response:
        assert (await response.json())["choices"]


async def parts() -> None:
    """a message of several text parts, and an answer that is continued"""
    content = [{"type": "text", "text": "Say this again:"}, {"type": "text", "text": "good morning"}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "Good"}]
    async with post({"messages": messages, "stream": True, "max_tokens": 8}) as response:
        assert [event async for event in events(response)]


async def task(prompt: str) -> str:
    body = {"messages": [{"role": "user", "content": prompt}], "stream": False, "max_completion_tokens": 100}
    async with post(body) as response:
        answer = await response.json()
    return str(answer["choices"][0]["message"]["content"])


async def tasks() -> None:
    """its requests for a title, tags, follow-ups and the completion of a prompt"""
    history = "<chat_history>\nUSER: What is the weather in Paris?\nASSISTANT: Sunny.\n</chat_history>"
    for asked, form in (
        ("a title of 3 to 5 words", '{ "title": "your title" }'),
        ("1 to 3 tags", '{ "tags": ["tag1", "tag2"] }'),
        ("3 to 5 follow-up questions", '{ "follow_ups": ["Question 1?"] }'),
        ("the end of the user's sentence", '{ "text": "<completion>" }'),
    ):
        assert await task(f"### Task:\nWrite {asked} for the chat.\n### Output:\nJSON format: {form}\n{history}")


async def native_tools() -> None:
    """native function calling: the pieces of a call from the stream, then its result"""
    asked: dict[str, Any] = {"messages": [QUESTION], "tools": [TOOL], "stream": True, "max_tokens": 64}
    calls: dict[int, dict[str, Any]] = {}
    async with post({**asked, "tool_choice": "required", "parallel_tool_calls": False}) as response:
        async for event in events(response):
            for piece in event["choices"][0]["delta"].get("tool_calls") or [] if event["choices"] else []:
                call = calls.setdefault(piece["index"], {**piece, "function": {"name": "", "arguments": ""}})
                for key, value in piece["function"].items():
                    call["function"][key] += value or ""
    assert calls[0]["id"] and calls[0]["function"]["name"] == "get_weather"
    assert isinstance(json.loads(calls[0]["function"]["arguments"])["city"], str)
    messages = [
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": list(calls.values())},
        {"role": "tool", "tool_call_id": calls[0]["id"], "content": '{"sky": "sunny"}'},
    ]
    async with post({**asked, "messages": messages}) as response:
        assert [event async for event in events(response)]


run_steps((connection, chat, stop_button, parts, tasks, native_tools))
