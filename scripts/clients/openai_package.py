"""OpenAI's Python package: chat, streams, tools, structured output, batches and errors.

    python openai_package.py URL [URL_WITH_KEY KEY]

Batches need QUIRE_PYTHON, a Python that runs `-m quire` in the folder QUIRE_ROOT.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import openai
from openai.types.chat import ChatCompletion
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from pydantic import BaseModel, Field
from steps import run_steps

URL, KEYED = sys.argv[1] + "/v1", sys.argv[2:]
client = openai.OpenAI(base_url=URL, api_key="unused", max_retries=0)
MODEL = client.models.list().data[0].id
MESSAGES: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


class Weather(BaseModel):
    """Weather in a city."""

    city: str = Field(max_length=20)
    unit: Literal["celsius", "fahrenheit"]


TOOL: Any = openai.pydantic_function_tool(Weather, name="get_weather")
OTHER: Any = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


def models() -> None:
    """models.list and models.retrieve"""
    assert client.models.retrieve(MODEL).id == MODEL


def chat() -> None:
    """chat.completions.create"""
    response = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=16, temperature=0)
    choice = response.choices[0]
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert response.usage and 0 < response.usage.completion_tokens <= 16
    assert response.usage.total_tokens == response.usage.prompt_tokens + response.usage.completion_tokens


def chat_options() -> None:
    """n, logprobs, seed, stop"""
    response = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=2, logprobs=True, top_logprobs=3, seed=1, stop=["\n\n"], max_tokens=8
    )
    assert [choice.index for choice in response.choices] == [0, 1]
    for choice in response.choices:
        assert choice.logprobs and choice.logprobs.content
        assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in choice.logprobs.content)
    again = client.chat.completions.create(model=MODEL, messages=MESSAGES, n=2, seed=1, stop=["\n\n"], max_tokens=8)
    assert [c.message.content for c in again.choices] == [c.message.content for c in response.choices]


def raw_response() -> None:
    """with_raw_response and the request id"""
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=MESSAGES, max_tokens=1)
    assert raw.headers["x-request-id"] and raw.parse()._request_id == raw.headers["x-request-id"]


def chat_stream() -> None:
    """stream=True equals the whole answer, with usage"""
    arguments: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**arguments)
    text, usage, reasons = "", None, []
    for chunk in client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert text == whole.choices[0].message.content and reasons == [whole.choices[0].finish_reason]
    assert usage and whole.usage and usage.completion_tokens == whole.usage.completion_tokens


def stream_helper() -> None:
    """chat.completions.stream with its events"""
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, max_tokens=16, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        # The helper's get_final_completion() raises where max_tokens ended the answer.
        final = stream.current_completion_snapshot.choices[0]
    assert text == final.message.content and final.finish_reason in ("stop", "length")


def completions() -> None:
    """completions.create, whole, streamed and with two prompts"""
    whole = client.completions.create(model=MODEL, prompt="One, two,", max_tokens=8, temperature=0, logprobs=2)
    assert whole.choices[0].logprobs and len(whole.choices[0].logprobs.tokens or []) == 8
    stream = client.completions.create(model=MODEL, prompt="One, two,", max_tokens=8, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    both = client.completions.create(model=MODEL, prompt=["One, two,", "A, B,"], max_tokens=8, temperature=0)
    assert len(both.choices) == 2 and both.choices[0].text == whole.choices[0].text


async def asynchronous() -> None:
    """AsyncOpenAI: sixteen requests at once, and a stream that is closed early"""
    async with openai.AsyncOpenAI(base_url=URL, api_key="unused", max_retries=0) as client:

        async def ask(number: int) -> ChatCompletion:
            messages: Any = [{"role": "user", "content": f"Count to {number}."}]
            return await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8)

        responses = await asyncio.gather(*map(ask, range(16)))
        assert len({response.id for response in responses}) == 16
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=2000, stream=True)
        async for _ in stream:
            break
        await stream.close()


def check_call(call: Any) -> None:
    assert call.id and call.type == "function" and call.function.name == "get_weather"
    Weather.model_validate_json(call.function.arguments)


def tools_auto() -> None:
    """tools with tool_choice auto: a call or text"""
    response = client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[TOOL, OTHER], max_tokens=64)
    choice = response.choices[0]
    assert bool(choice.message.tool_calls) == (choice.finish_reason == "tool_calls")
    assert choice.message.tool_calls or choice.message.content


def tools_required() -> None:
    """tool_choice required, whole and streamed"""
    arguments: Any = {"model": MODEL, "messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"}
    arguments |= {"parallel_tool_calls": False, "max_tokens": 100, "temperature": 0}
    choice = client.chat.completions.create(**arguments).choices[0]
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    (call,) = choice.message.tool_calls or ()
    check_call(call)
    with client.chat.completions.stream(**arguments) as stream:
        kinds = {event.type for event in stream}
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert streamed.function.arguments == call.function.arguments  # type: ignore[union-attr]


def tools_named() -> None:
    """tool_choice with a function's name, and the tool's result in the next turn"""
    arguments: Any = {"model": MODEL, "tools": [TOOL, OTHER], "max_tokens": 100}
    message = client.chat.completions.create(**arguments, messages=MESSAGES, tool_choice=NAMED).choices[0].message
    (call,) = message.tool_calls or ()
    check_call(call)
    result = {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"}
    answer = client.chat.completions.create(
        **arguments, messages=[*MESSAGES, message.model_dump(exclude_none=True), result], tool_choice="none"
    )
    assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls


def tools_parsed() -> None:
    """chat.completions.parse with pydantic_function_tool"""
    arguments: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 100, "parallel_tool_calls": False}
    message = client.chat.completions.parse(**arguments, tools=[TOOL], tool_choice="required").choices[0].message
    assert message.tool_calls and isinstance(message.tool_calls[0].function.parsed_arguments, Weather)


def json_schema() -> None:
    """response_format json_schema and json_object"""
    schema = {"name": "weather", "schema": Weather.model_json_schema(), "strict": True}
    form: Any = {"type": "json_schema", "json_schema": schema}
    response = client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=form, max_tokens=100)
    Weather.model_validate_json(response.choices[0].message.content or "")
    asked: Any = [{"role": "user", "content": "Reply with a JSON object that has the key city."}]
    free = client.chat.completions.create(
        model=MODEL, messages=asked, response_format={"type": "json_object"}, max_tokens=200, temperature=0
    )
    if free.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(free.choices[0].message.content or ""), dict)


def parsed() -> None:
    """chat.completions.parse with a pydantic model, and stream with it"""
    arguments: Any = {"model": MODEL, "messages": MESSAGES, "response_format": Weather, "max_tokens": 100}
    assert isinstance(client.chat.completions.parse(**arguments).choices[0].message.parsed, Weather)
    with client.chat.completions.stream(**arguments) as stream:
        for _ in stream:
            pass
    assert isinstance(stream.get_final_completion().choices[0].message.parsed, Weather)


def expect(error: type[openai.APIStatusError], call: Any, *words: str) -> None:
    try:
        call()
    except error as raised:
        assert all(word in raised.message for word in words), raised.message
    else:
        raise AssertionError(f"no {error.__name__}")


def errors() -> None:
    """NotFoundError, BadRequestError, and embeddings refused with a reason"""
    chat = client.chat.completions.create
    expect(openai.NotFoundError, lambda: chat(model="gpt-5", messages=MESSAGES), "gpt-5")
    expect(openai.NotFoundError, lambda: client.models.retrieve("gpt-5"), "gpt-5")
    expect(openai.BadRequestError, lambda: chat(model=MODEL, messages=MESSAGES, temperature=-1), "temperature")
    expect(openai.BadRequestError, lambda: chat(model=MODEL, messages=[]), "message")
    patient = client.with_options(max_retries=50)  # a refusal for good is not sent again
    expect(
        openai.APIStatusError,
        lambda: patient.embeddings.create(model=MODEL, input="a"),
        "this model generates text",
        "embed",
    )


def keys() -> None:
    """AuthenticationError without a key of a server with --api-key"""
    url, key = KEYED
    good = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    assert good.models.list().data[0].id == MODEL
    bad = good.with_options(api_key="wrong")
    expect(openai.AuthenticationError, lambda: bad.models.list())
    expect(openai.AuthenticationError, lambda: bad.chat.completions.create(model=MODEL, messages=MESSAGES))


def responses() -> None:
    """responses.create, responses.stream with its events, and a response continued"""
    arguments: Any = {"model": MODEL, "max_output_tokens": 24, "temperature": 0}
    whole = client.responses.create(**arguments, input="Name a colour.")
    with client.responses.stream(**arguments, input="Name a colour.") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert whole.output_text and final.output_text == whole.output_text
    assert kinds[0] == "response.created" and kinds.count("response.output_text.delta") > 1
    assert kinds[-1] in ("response.completed", "response.incomplete")
    again = client.responses.create(**arguments, input="And another?", previous_response_id=whole.id)
    assert again.usage and whole.usage and again.usage.input_tokens > whole.usage.total_tokens
    assert client.responses.retrieve(again.id).output_text == again.output_text


def responses_in_background() -> None:
    """responses in the background: polled, followed, cancelled and deleted"""
    arguments: Any = {"model": MODEL, "input": "Tell a story.", "extra_body": {"ignore_eos": True}}
    short = client.responses.create(**arguments, background=True, max_output_tokens=8)
    while client.responses.retrieve(short.id).status in ("queued", "in_progress"):
        pass
    done = client.responses.retrieve(short.id)
    assert done.status == "incomplete" and done.usage and done.usage.output_tokens == 8
    events = client.responses.create(**arguments, background=True, stream=True, max_output_tokens=2000)
    first = next(iter(events))
    assert first.type == "response.created"
    assert client.responses.cancel(first.response.id).status == "cancelled"
    client.responses.delete(first.response.id)
    expect(openai.NotFoundError, lambda: client.responses.retrieve(first.response.id), first.response.id)


def batch() -> None:
    """a batch file through `quire run-batch`"""
    body: CompletionCreateParamsNonStreaming = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8}
    line = {"method": "POST", "url": "/v1/chat/completions"}
    good = {"custom_id": "good", **line, "body": body}
    bad = {"custom_id": "bad", **line, "body": {**body, "max_tokens": -5}}
    with tempfile.TemporaryDirectory() as folder:
        requests, results = Path(folder, "requests.jsonl"), Path(folder, "results.jsonl")
        requests.write_text("".join(json.dumps(line) + "\n" for line in (good, bad)))
        command = [os.environ["QUIRE_PYTHON"], "-m", "quire", "run-batch", "-i", requests, "-o", results, "--url", URL]
        done = subprocess.run(command, cwd=os.environ["QUIRE_ROOT"], timeout=300)
        assert done.returncode == 0  # a line that fails is a result
        first, second = map(json.loads, results.read_text().splitlines())
    assert (first["custom_id"], second["custom_id"]) == ("good", "bad")
    assert first["response"]["status_code"] == 200 and first["error"] is None
    assert ChatCompletion.model_validate(first["response"]["body"]).choices[0].message.content
    assert second["response"]["status_code"] == 400 or second["error"]


STEPS = (models, chat, chat_options, raw_response, chat_stream, stream_helper, completions, asynchronous)
TOOLS = (tools_auto, tools_required, tools_named, tools_parsed, json_schema, parsed, errors)
RESPONSES = (responses, responses_in_background)
run_steps(
    (*STEPS, *TOOLS, *RESPONSES, *((keys,) if KEYED else ()), *((batch,) if "QUIRE_PYTHON" in os.environ else ()))
)
