"""LiteLLM, with the prefixes openai/ and hosted_vllm/: python litellm_calls.py URL."""

import sys
from typing import Any, Literal

import litellm
from openai import OpenAI
from pydantic import BaseModel, Field
from steps import run_steps

URL = sys.argv[1] + "/v1"
MODEL = OpenAI(base_url=URL, api_key="unused").models.list().data[0].id
OPTIONS: Any = {"api_base": URL, "api_key": "unused", "max_tokens": 16, "temperature": 0, "num_retries": 0}
ASKED: Any = OPTIONS | {"messages": [{"role": "user", "content": "What is the weather in Paris?"}]}
PREFIXES = ("openai", "hosted_vllm")


class Weather(BaseModel):
    """Weather in a city."""

    city: str = Field(max_length=20)
    unit: Literal["celsius", "fahrenheit"]


TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": Weather.model_json_schema()}}


def completion() -> None:
    """completion as openai/ and hosted_vllm/, whole and streamed"""
    for prefix in PREFIXES:
        model = f"{prefix}/{MODEL}"
        whole = litellm.completion(model=model, **ASKED)
        assert whole.choices[0].message.content and whole.usage.completion_tokens > 0
        chunks = list(litellm.completion(model=model, **ASKED, stream=True, stream_options={"include_usage": True}))
        rebuilt = litellm.stream_chunk_builder(chunks)
        assert rebuilt.choices[0].message.content == whole.choices[0].message.content
        assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens


async def asynchronous() -> None:
    """acompletion as openai/ and hosted_vllm/, whole and streamed"""
    for prefix in PREFIXES:
        model = f"{prefix}/{MODEL}"
        whole = await litellm.acompletion(model=model, **ASKED)
        stream = await litellm.acompletion(model=model, **ASKED, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == whole.choices[0].message.content


def text_completion() -> None:
    """text_completion as text-completion-openai/ and hosted_vllm/"""
    for prefix in ("text-completion-openai", "hosted_vllm"):
        response = litellm.text_completion(model=f"{prefix}/{MODEL}", prompt="One, two,", **OPTIONS)
        assert response.choices[0].text


def tools() -> None:
    """tools with tool_choice required and auto"""
    for prefix in PREFIXES:
        options = ASKED | {"max_tokens": 64, "tools": [TOOL], "parallel_tool_calls": False}
        message = litellm.completion(model=f"{prefix}/{MODEL}", **options, tool_choice="required").choices[0].message
        (call,) = message.tool_calls
        assert call.function.name == "get_weather" and Weather.model_validate_json(call.function.arguments)
    litellm.completion(model=f"hosted_vllm/{MODEL}", **options, tool_choice="auto")


def structured() -> None:
    """response_format with a pydantic model"""
    for prefix in PREFIXES:
        response = litellm.completion(model=f"{prefix}/{MODEL}", **ASKED | {"max_tokens": 64}, response_format=Weather)
        Weather.model_validate_json(response.choices[0].message.content)


def errors() -> None:
    """its NotFoundError and BadRequestError"""
    for model, options, error in (
        ("openai/no-such-model", {}, litellm.NotFoundError),
        (f"hosted_vllm/{MODEL}", {"temperature": -1}, litellm.BadRequestError),
    ):
        try:
            litellm.completion(model=model, **ASKED | options)
        except error:
            continue
        raise AssertionError(f"no {error.__name__}")


run_steps((completion, asynchronous, text_completion, tools, structured, errors))
