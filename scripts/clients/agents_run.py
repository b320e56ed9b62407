"""OpenAI's agents package with a tool, on a server without flags, by chat and by Responses: agents_run.py URL."""

import functools
import sys
from typing import Any, Literal

from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field
from steps import run_steps

URL = sys.argv[1] + "/v1"
MODEL = OpenAI(base_url=URL, api_key="unused").models.list().data[0].id
QUESTION = "What is the weather in Paris?"
called: list[str] = []
client = AsyncOpenAI(base_url=URL, api_key="unused", max_retries=0)
MODELS: dict[str, Model] = {
    "by chat": OpenAIChatCompletionsModel(MODEL, client),
    "by Responses": OpenAIResponsesModel(MODEL, client),
}
used = ["by chat"]
set_tracing_disabled(True)


# A model as small as this one calls again and again what it has called once.
@function_tool(is_enabled=lambda context, agent: not called)
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Weather in a city."""
    called.append(city)
    return f"It is sunny in {city}."


class Weather(BaseModel):
    city: str = Field(max_length=20)
    sky: Literal["clear", "cloudy"]


def agent(**options: Any) -> Agent:
    called.clear()
    # A response that is cut off is an error by Responses: one sentence, which ends, is enough.
    choice, parallel = options.pop("tool_choice", None), options.pop("parallel_tool_calls", None)
    settings = ModelSettings(
        max_tokens=128, temperature=0, tool_choice=choice, parallel_tool_calls=parallel, extra_body={"stop": "."}
    )
    return Agent("Assistant", instructions="You are brief.", model=MODELS[used[0]], model_settings=settings, **options)


async def without_tools() -> None:
    """Runner.run without tools"""
    result = await Runner.run(agent(), QUESTION)
    assert result.final_output and result.context_wrapper.usage.output_tokens > 0


async def auto() -> None:
    """a tool with tool_choice auto"""
    result = await Runner.run(agent(tools=[get_weather]), QUESTION, max_turns=5)
    assert isinstance(result.final_output, str)


async def required() -> None:
    """tool_choice required: the tool runs and its result goes back to the model"""
    result = await Runner.run(agent(tools=[get_weather], tool_choice="required"), QUESTION, max_turns=5)
    assert called and called[0] in ("Paris", "Rome")
    kinds = [item.type for item in result.new_items]
    assert "tool_call_item" in kinds and "tool_call_output_item" in kinds and isinstance(result.final_output, str)


async def named() -> None:
    """tool_choice with the tool's name, ending with its result"""
    options = {"tools": [get_weather], "tool_choice": "get_weather", "tool_use_behavior": "stop_on_first_tool"}
    result = await Runner.run(agent(**options), QUESTION)
    assert result.final_output in ("It is sunny in Paris.", "It is sunny in Rome.")


async def streamed() -> None:
    """Runner.run_streamed with a tool: arguments arrive in pieces"""
    result = Runner.run_streamed(agent(tools=[get_weather], tool_choice="required"), QUESTION, max_turns=5)
    kinds = [event.data.type async for event in result.stream_events() if event.type == "raw_response_event"]
    assert called and "response.function_call_arguments.delta" in kinds and "response.completed" in kinds


async def output_type() -> None:
    """output_type with a pydantic model"""
    result = await Runner.run(agent(output_type=Weather), QUESTION)
    assert isinstance(result.final_output, Weather)


async def handoff() -> None:
    """a handoff to another agent"""
    other = agent()
    other.name = "Expert"
    result = await Runner.run(
        agent(handoffs=[other], tool_choice="required", parallel_tool_calls=False), QUESTION, max_turns=5
    )
    assert result.last_agent.name == "Expert"


async def previous_response() -> None:
    """a conversation by previous_response_id"""
    first = await Runner.run(agent(), "My name is Mark.")
    second = await Runner.run(agent(), "My name?", previous_response_id=first.last_response_id)
    assert second.last_response_id not in (None, first.last_response_id)


def by(name: str, step: Any) -> Any:
    """The same step with another of the models."""

    @functools.wraps(step)
    async def run() -> None:
        used[0] = name
        await step()

    run.__doc__ = f"{step.__doc__} ({name})"
    return run


STEPS = (without_tools, auto, required, named, streamed, output_type, handoff)
run_steps((*(by(name, step) for name in MODELS for step in STEPS), by("by Responses", previous_response)))
