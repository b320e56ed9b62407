"""LangChain's ChatOpenAI: python langchain_chat.py URL."""

import asyncio
import sys
from typing import Literal

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from openai import OpenAI as Client
from pydantic import BaseModel, Field
from steps import run_steps

URL = sys.argv[1] + "/v1"
MODEL = Client(base_url=URL, api_key="unused").models.list().data[0].id
llm = ChatOpenAI(base_url=URL, api_key="unused", model=MODEL, temperature=0, max_tokens=64, max_retries=0)
QUESTION = "What is the weather in Paris?"


class Weather(BaseModel):
    """Weather in a city."""

    city: str = Field(max_length=20)
    unit: Literal["celsius", "fahrenheit"]


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Weather in a city."""
    return f"12 degrees in {city}"


def invoke() -> None:
    """ChatOpenAI.invoke, batch, and a chain with a prompt template"""
    answer = llm.invoke([SystemMessage("You are brief."), HumanMessage(QUESTION)])
    assert isinstance(answer, AIMessage) and answer.content
    assert answer.usage_metadata and answer.usage_metadata["output_tokens"] > 0
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    assert len(llm.batch(["Hello", "Good morning"])) == 2
    chain = ChatPromptTemplate.from_messages([("system", "You are brief."), ("user", "{text}")]) | llm
    assert (chain | StrOutputParser()).invoke({"text": QUESTION}) == answer.content


def stream() -> None:
    """stream equals invoke, with usage"""
    whole, chunks = llm.invoke(QUESTION), list(llm.stream(QUESTION, stream_usage=True))
    assert len(chunks) > 3 and "".join(str(chunk.content) for chunk in chunks) == whole.content
    total = chunks[0]
    for chunk in chunks[1:]:
        total = total + chunk
    assert total.usage_metadata == whole.usage_metadata


async def asynchronous() -> None:
    """ainvoke and astream"""
    answers = await asyncio.gather(*(llm.ainvoke(f"Count to {number}.") for number in range(4)))
    assert all(answer.content for answer in answers)
    assert "".join([str(chunk.content) async for chunk in llm.astream("Count to 0.")]) == answers[0].content


def tools() -> None:
    """bind_tools: auto, any and by name, a stream of a call, and the tool's result"""
    assert isinstance(llm.bind_tools([get_weather]).invoke(QUESTION), AIMessage)
    for choice in ("any", "get_weather"):
        bound = llm.bind_tools([get_weather], tool_choice=choice, parallel_tool_calls=False)
        answer = bound.invoke(QUESTION)
        (call,) = answer.tool_calls
        assert call["name"] == "get_weather" and call["args"]["city"] in ("Paris", "Rome")
        total = None
        for chunk in bound.stream(QUESTION):
            total = chunk if total is None else total + chunk
        assert total is not None and total.tool_calls[0]["args"] == call["args"]
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    final = llm.bind_tools([get_weather], tool_choice="none").invoke([HumanMessage(QUESTION), answer, result])
    assert final.content and not final.tool_calls


def structured() -> None:
    """with_structured_output by json_schema (default), function_calling and as a dict"""
    assert isinstance(llm.with_structured_output(Weather).invoke(QUESTION), Weather)
    assert isinstance(llm.with_structured_output(Weather, method="function_calling").invoke(QUESTION), Weather)
    found = llm.with_structured_output(Weather.model_json_schema(), include_raw=True).invoke(QUESTION)
    assert found["parsing_error"] is None and Weather.model_validate(found["parsed"])


def logprobs() -> None:
    """bind(logprobs=True)"""
    answer = llm.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert len(answer.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2


def completions() -> None:
    """OpenAI, its class for plain completions"""
    plain = OpenAI(base_url=URL, api_key="unused", model=MODEL, temperature=0, max_tokens=8)
    assert plain.invoke("One, two,") == "".join(plain.stream("One, two,"))


run_steps((invoke, stream, asynchronous, tools, structured, logprobs, completions))
