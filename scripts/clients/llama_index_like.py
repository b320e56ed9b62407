"""LlamaIndex's OpenAILike: python llama_index_like.py URL."""

import sys
from typing import Any, Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from openai import OpenAI
from pydantic import BaseModel, Field
from steps import run_steps

URL = sys.argv[1] + "/v1"
MODEL = OpenAI(base_url=URL, api_key="unused").models.list().data[0].id
OPTIONS: Any = {"model": MODEL, "api_base": URL, "api_key": "unused", "max_tokens": 64, "temperature": 0}
plain = OpenAILike(**OPTIONS, max_retries=0, timeout=600)
chatty = OpenAILike(**OPTIONS, max_retries=0, timeout=600, is_chat_model=True, is_function_calling_model=True)
MESSAGES = [ChatMessage(role="system", content="You are brief."), ChatMessage(role="user", content="Hello!")]


class Weather(BaseModel):
    """Weather in a city."""

    city: str = Field(max_length=20)
    unit: Literal["celsius", "fahrenheit"]


def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Weather in a city."""
    return f"12 degrees in {city}"


def complete() -> None:
    """complete and stream_complete, by completions and by chat"""
    for llm in (plain, chatty):
        whole = llm.complete("One, two,").text
        parts = list(llm.stream_complete("One, two,"))
        assert whole and parts[-1].text == whole == "".join(part.delta or "" for part in parts)


def chat() -> None:
    """chat and stream_chat"""
    whole = chatty.chat(MESSAGES).message
    assert whole.role == "assistant" and whole.content
    parts = list(chatty.stream_chat(MESSAGES))
    assert parts[-1].message.content == whole.content == "".join(part.delta or "" for part in parts)


async def asynchronous() -> None:
    """achat, astream_chat and acomplete"""
    whole = (await chatty.achat(MESSAGES)).message.content
    assert whole == "".join([part.delta or "" async for part in await chatty.astream_chat(MESSAGES)])
    assert (await plain.acomplete("One, two,")).text


def tools() -> None:
    """chat_with_tools and predict_and_call with a required tool"""
    tool = FunctionTool.from_defaults(get_weather)
    response = chatty.chat_with_tools([tool], "Weather in Paris?", tool_required=True)
    (call,) = chatty.get_tool_calls_from_response(response)
    assert call.tool_name == "get_weather" and call.tool_kwargs["city"] in ("Paris", "Rome")
    chatty.chat_with_tools([tool], "Weather in Paris?")  # auto: a call or text
    *_, last = chatty.stream_chat_with_tools([tool], "Weather in Paris?", tool_required=True)
    assert chatty.get_tool_calls_from_response(last)[0].tool_kwargs == call.tool_kwargs
    called = chatty.predict_and_call([tool], "Weather in Paris?", tool_required=True)
    assert called.response.startswith("12 degrees in")


def structured() -> None:
    """structured_predict with a pydantic model"""
    options = {"tool_choice": "required"}
    found = chatty.structured_predict(Weather, PromptTemplate("Weather in {city}?"), llm_kwargs=options, city="Paris")
    assert isinstance(found, Weather)


run_steps((complete, chat, asynchronous, tools, structured))
