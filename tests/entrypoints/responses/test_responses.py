"""/v1/responses as the official client sees it, from a scripted engine."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from quire.config.server import ServerConfig
from quire.entrypoints.http.shared_store import SharedStore
from tests.entrypoints.openai.test_parsed_chat import say, says
from tests.entrypoints.stub_server import MODEL, StubServer, refusal, stub_engine, stub_server

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
NOW: Any = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
# What opens, and what closes it.
PAIRS = {
    "response.created": ("response.completed", "response.incomplete"),
    "response.output_item.added": ("response.output_item.done",),
    "response.content_part.added": ("response.content_part.done",),
}


@pytest.fixture(scope="module")
def thinker() -> Iterator[StubServer]:
    config = ServerConfig(reasoning_parser="qwen3", tool_call_parser="hermes")
    with stub_server(says(""), config) as one:
        yield one


@pytest.fixture(scope="module")
def keyed() -> Iterator[StubServer]:
    with stub_server(stub_engine(), ServerConfig(max_stored_responses=2), api_keys=("a", "b")) as one:
        yield one


def events_of(server: StubServer, **fields: Any) -> list[Any]:
    events = list(server.client().responses.create(model=MODEL, stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    open_events = []
    for event in events:
        if event.type in PAIRS:
            open_events.append(event.type)
        elif any(event.type in ends for ends in PAIRS.values()):
            assert event.type in PAIRS[open_events.pop()]
    assert not open_events
    return events


def shape(items: Any) -> list[dict[str, Any]]:
    """Output items without their ids, which differ from response to response."""
    return [{k: v for k, v in item.to_dict().items() if k not in ("id", "call_id")} for item in items]


def test_a_text_whole_and_streamed(server: StubServer) -> None:
    client = server.client()
    asked = {"model": MODEL, "input": "Hello", "extra_body": {"stop": [" twelve"]}}
    whole = client.responses.create(**asked)
    assert whole.status == "completed" and whole.output_text.endswith(" eleven") and whole.error is None
    assert whole.usage is not None and whole.usage.output_tokens_details.reasoning_tokens == 0
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    with client.responses.stream(**asked) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert final.output_text == whole.output_text == deltas and final.usage == whole.usage


def test_the_response_says_what_was_asked(server: StubServer) -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "metadata": {"a": "b"}, "instructions": "Be brief.", "user": "me"}
    response = server.client().responses.create(model=MODEL, input="Hello", max_output_tokens=3, **fields)
    assert {name: getattr(response, name) for name in fields} == fields
    assert (response.status, response.max_output_tokens) == ("incomplete", 3)
    assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"
    assert (response.truncation, response.parallel_tool_calls, response.tool_choice) == ("disabled", True, "auto")


def test_the_events_of_reasoning_text_and_calls(thinker: StubServer) -> None:
    say(thinker.engine, "<think>Hm, Oslo.</think>\n\n" + CALLS)
    events = events_of(thinker, input="Weather?", tools=[WEATHER, NOW])
    kinds = [event.type for event in events]
    text = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    thought = ["content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done"]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    expected = ["created", "in_progress"]
    for parts in (thought, text, call, call):
        expected += ["output_item.added", *parts, "output_item.done"]
    expected.append("completed")
    without_repeats = [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
    assert without_repeats == [f"response.{kind}" for kind in expected]
    final = events[-1].response
    reasoning, message, weather, now = final.output
    assert reasoning.content[0].text == "Hm, Oslo." and message.content[0].text.strip() == "Let me see."
    assert (weather.name, json.loads(weather.arguments)) == ("get_weather", {"city": "Oslo"})
    assert (now.name, json.loads(now.arguments)) == ("now", {}) and weather.call_id != now.call_id
    assert final.usage.output_tokens_details.reasoning_tokens == 0  # its tags are no tokens of this model
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert shape(done) == shape(final.output)
    whole = thinker.client().responses.create(model=MODEL, input="Weather?", tools=[WEATHER, NOW])
    assert shape(whole.output) == shape(final.output)


def test_reasoning_can_be_left_out(thinker: StubServer) -> None:
    say(thinker.engine, "<think>Hm.</think>Yes.")
    response = thinker.client().responses.create(model=MODEL, input="?", extra_body={"include_reasoning": False})
    assert [item.type for item in response.output] == ["message"] and response.output_text == "Yes."


def test_one_call_at_a_time_and_only_what_is_allowed(thinker: StubServer) -> None:
    say(thinker.engine, CALLS)
    client = thinker.client()
    one = client.responses.create(model=MODEL, input="?", tools=[WEATHER, NOW], parallel_tool_calls=False)
    assert [item.type for item in one.output] == ["message", "function_call"]
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}
    say(thinker.engine, '[{"name": "now", "parameters": {}}]')
    forced = client.responses.create(model=MODEL, input="?", tools=[WEATHER, NOW], tool_choice=allowed)
    assert [item.name for item in forced.output if item.type == "function_call"] == ["now"]


def test_logprobs_are_those_of_the_text(thinker: StubServer) -> None:
    say(thinker.engine, "Yes, it is.")
    fields: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "input": "?"}
    whole = thinker.client().responses.create(model=MODEL, **fields).output[-1]
    assert whole.type == "message" and whole.content[0].type == "output_text"
    tokens = whole.content[0].logprobs or []
    assert "".join(one.token for one in tokens).startswith("Yes, it is.")
    assert all(len(one.top_logprobs) <= 2 for one in tokens)
    streamed = [e for e in events_of(thinker, **fields) if e.type == "response.output_text.delta"]
    assert [one.token for event in streamed for one in event.logprobs] == [one.token for one in tokens]


def test_a_schema_parses_into_a_model(server: StubServer) -> None:
    class Answer(BaseModel):
        ok: bool

    say(server.engine, '{"ok": true}')
    try:
        parsed = server.client().responses.parse(model=MODEL, input="?", text_format=Answer)
        assert parsed.output_parsed == Answer(ok=True)
    finally:
        server.engine.rule = stub_engine().rule


def test_a_conversation_goes_on_by_id(server: StubServer) -> None:
    client = server.client()
    first = client.responses.create(
        model=MODEL, input="My name is Mark.", instructions="Remember.", max_output_tokens=4
    )
    second = client.responses.create(input="My name?", previous_response_id=first.id, model=MODEL)
    assert second.previous_response_id == first.id and second.instructions is None
    body = {"input": "My name?", "previous_response_id": first.id}
    rendered = server.post("/v1/responses/render", body).json()
    prompt = server.engine.tokenizer.decode(rendered["token_ids"], skip_special_tokens=False)
    assert "My name is Mark." in prompt and first.output_text in prompt and "Remember." not in prompt
    counted = client.responses.input_tokens.count(model=MODEL, input="My name?", previous_response_id=first.id)
    assert counted.input_tokens == len(rendered["token_ids"])
    (item,) = client.responses.input_items.list(second.id)
    assert item.type == "message" and item.content[0].text == "My name?"  # type: ignore[union-attr]


def test_a_conversation_is_no_larger_than_a_request_may_be() -> None:
    with stub_server(stub_engine(), ServerConfig(max_request_bytes=600)) as server:
        first = server.post("/v1/responses", {"input": "x" * 300, "max_output_tokens": 1}).json()["id"]
        more = {"input": "y" * 300, "max_output_tokens": 1, "truncation": "auto"}
        second = server.post("/v1/responses", more | {"previous_response_id": first})
        third = server.post("/v1/responses", more | {"previous_response_id": second.json()["id"]})
        assert "the conversation so far is larger than 600 bytes" in refusal(third)


@pytest.mark.parametrize("limit", ["--5", "0", "101", "x", "1e1", "9" * 13])
def test_wrong_pages(server: StubServer, limit: str) -> None:
    stored = server.client().responses.create(model=MODEL, input="Hello", max_output_tokens=1)
    wrong = server.get(f"/v1/responses/{stored.id}/input_items", params={"limit": limit})
    assert "it must be between 1 and 100" in refusal(wrong)


def test_a_response_that_is_not_stored(server: StubServer) -> None:
    client = server.client()
    response = client.responses.create(model=MODEL, input="Hello", store=False, max_output_tokens=2)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="not found"):
            call(response.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.responses.create(model=MODEL, input="?", previous_response_id=response.id)


def test_a_key_cannot_read_what_another_has_stored(keyed: StubServer) -> None:
    mine, yours = (keyed.client().with_options(api_key=key) for key in "ab")
    response = mine.responses.create(model=MODEL, input="Hello", max_output_tokens=2)
    assert mine.responses.retrieve(response.id).output_text == response.output_text
    for call in (yours.responses.retrieve, yours.responses.delete, yours.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(response.id)
    with pytest.raises(openai.NotFoundError):
        list(yours.responses.input_items.list(response.id))
    mine.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        mine.responses.retrieve(response.id)


def test_a_full_store_forgets_the_oldest(keyed: StubServer) -> None:
    client = keyed.client().with_options(api_key="a")
    ids = [client.responses.create(model=MODEL, input="Hello", max_output_tokens=2).id for _ in range(3)]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(ids[0])
    assert [client.responses.retrieve(id).id for id in ids[1:]] == ids[1:]


def test_in_the_background(server: StubServer) -> None:
    client = server.client()
    response = client.responses.create(model=MODEL, input="Hello", background=True, max_output_tokens=4)
    assert response.status == "queued" and response.background
    server.wait_until(lambda: not server.server.context.jobs)
    done = client.responses.retrieve(response.id)
    assert done.status == "incomplete" and done.output_text.count(" ") == 4
    assert client.responses.cancel(response.id).status == "incomplete"  # it has ended before


def test_a_stream_in_the_background_is_followed_from_any_event(server: StubServer) -> None:
    client = server.client()
    fields: Any = {"model": MODEL, "input": "Hello", "max_output_tokens": 5}
    events = list(client.responses.create(background=True, stream=True, **fields))
    assert [event.type for event in events[:3]] == [f"response.{kind}" for kind in ("created", "queued", "in_progress")]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    id = events[0].response.id
    again = list(client.responses.retrieve(id, stream=True, starting_after=3))
    assert again == events[4:] and again[-1].type == "response.incomplete"


def test_cancelling_ends_the_request_in_the_engine(slow: StubServer) -> None:
    client = slow.client()
    response = client.responses.create(model=MODEL, input="Hello", background=True, max_output_tokens=5000)
    slow.wait_until(lambda: bool(slow.engine.running))
    assert client.responses.cancel(response.id).status == "cancelled"
    slow.wait_until(lambda: not slow.engine.running and not slow.server.context.jobs)
    assert client.responses.retrieve(response.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="is cancelled"):
        client.responses.create(model=MODEL, input="?", previous_response_id=response.id)


def test_deleting_ends_it_too(slow: StubServer) -> None:
    client = slow.client()
    response = client.responses.create(model=MODEL, input="Hello", background=True, max_output_tokens=5000)
    slow.wait_until(lambda: bool(slow.engine.running))
    client.responses.delete(response.id)
    slow.wait_until(lambda: not slow.engine.running and not slow.server.context.jobs)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


@pytest.mark.parametrize("background", [False, True])
def test_a_disconnect_in_mid_stream(slow: StubServer, background: bool) -> None:
    body = {"input": "Hello", "stream": True, "max_output_tokens": 5000, "background": background}
    with httpx.stream("POST", f"{slow.url}/v1/responses", json=body, timeout=20) as response:
        first = next(line for line in response.iter_lines() if line.startswith("data"))
    id = json.loads(first.removeprefix("data: "))["response"]["id"]
    if background:
        assert slow.engine.running  # it goes on, and can be followed again
        slow.client().responses.cancel(id)
    slow.wait_until(lambda: not slow.engine.running and not slow.server.context.jobs)


def test_background_responses_may_not_fill_the_store_forever() -> None:
    with stub_server(stub_engine(0.02), ServerConfig(max_stored_responses=1)) as server:
        body = {"input": "Hello", "background": True, "max_output_tokens": 5000}
        id = server.post("/v1/responses", body).json()["id"]
        assert "full" in refusal(server.post("/v1/responses", body), 503)
        assert server.post(f"/v1/responses/{id}/cancel").json()["status"] == "cancelled"
        server.wait_until(lambda: not server.engine.running and not server.server.context.jobs)
        assert server.post("/v1/responses", body).json()["status"] == "queued"


def test_a_response_whose_events_do_not_fit_leaves_nothing_behind() -> None:
    with stub_server(stub_engine(0.02), ServerConfig(max_stored_response_bytes=3500)) as server:
        body = {"input": "Hello", "background": True, "stream": True, "max_output_tokens": 5000}
        for _ in range(3):
            assert "too large" in refusal(server.post("/v1/responses", body), 503)
        server.wait_until(lambda: not server.engine.running and not server.server.context.jobs)
        assert isinstance(server.server.context.store, SharedStore) and len(server.server.context.store) == 0


def test_a_server_without_a_store() -> None:
    with stub_server(stub_engine(), ServerConfig(max_stored_responses=0)) as server:
        response = server.client().responses.create(model=MODEL, input="Hello", max_output_tokens=2)
        assert response.to_dict()["store"] is False
        assert "--max-stored-responses" in refusal(server.post("/v1/responses", {"input": "?", "background": True}))


def test_a_long_conversation_loses_its_oldest_messages_if_it_may(server: StubServer) -> None:
    items = [{"role": "user", "content": f"{i} " + "hi " * 900} for i in range(20)]
    body = {"input": items, "instructions": "Stay.", "max_output_tokens": 2}
    assert "tokens" in refusal(server.post("/v1/responses", body))
    rendered = server.post("/v1/responses/render", body | {"truncation": "auto"}).json()["token_ids"]
    prompt = server.engine.tokenizer.decode(rendered)
    assert "Stay." in prompt and "19 hi" in prompt and "0 hi hi hi" not in prompt.replace("10 hi", "")
    assert len(rendered) > server.engine.max_model_len - 1000
    alone = {"input": "hi " * 9000, "truncation": "auto"}
    assert "tokens" in refusal(server.post("/v1/responses", alone))


def test_an_answer_that_has_begun_is_continued(server: StubServer) -> None:
    begun = {"type": "message", "role": "assistant", "content": "I am", "status": "incomplete"}
    body = {"input": [{"role": "user", "content": "Who?"}, begun]}
    rendered = server.post("/v1/responses/render", body).json()["token_ids"]
    assert server.engine.tokenizer.decode(rendered).endswith("I am")


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "input is required"),
        ({"input": []}, "input is required"),
        ({"input": 3}, "input: expected"),
        (item(type="computer_call"), "input[0].type is 'computer_call'; allowed: message, reasoning, function_call"),
        (item(type="item_reference", id="x"), "input[0].type is 'item_reference'"),
        (item(role="robot", content="x"), "input[0].role is 'robot'; allowed: user"),
        (item(role="user", content=3), "input[0].content must be a string"),
        (
            item(role="user", content=[{"type": "input_image"}]),
            "input[0].content[0].type is 'input_image'; allowed",
        ),
        (item(role="user", content=[{"type": "input_file"}]), "'input_file'"),
        (item(type="function_call", name="x", arguments="{}"), "input[0].call_id must be a string"),
        (item(type="function_call_output", call_id="x"), "input[0].output must be a string"),
        (item(type="reasoning", encrypted_content="x"), "encrypted_content"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type is 'web_search'; allowed: function"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].function.name"),
        ({"input": "x", "tool_choice": "now"}, "tool_choice is 'now'; allowed"),
        ({"input": "x", "tool_choice": {"type": "function", "name": "now"}}, "tool_choice requires a call"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type is 'xml'; allowed: text"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema is required"),
        ({"input": "x", "include": ["all"]}, "include has 'all'; allowed"),
        ({"input": "x", "top_logprobs": 2}, "top_logprobs needs message.output_text.logprobs"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens is 0"),
        ({"input": "x", "temperature": -1}, "temperature is -1"),
        ({"input": "x", "truncation": "some"}, "truncation is 'some'; allowed: auto, disabled"),
        ({"input": "x", "metadata": {str(i): "" for i in range(17)}}, "metadata is too large"),
        ({"input": "x", "metadata": {"a": 1}}, "metadata"),
        ({"input": "x", "conversation": "conv_1"}, "previous_response_id"),
        ({"input": "x", "prompt": {"id": "pmpt_1"}}, "prompt: a stored prompt is not available"),
        ({"input": "x", "background": True, "store": False}, "background can only be used when `store` is true"),
        ({"input": "x", "previous_response_id": "msg_1"}, "must begin with resp_"),
    ],
)
def test_mistakes_are_explained(server: StubServer, body: dict[str, Any], message: str) -> None:
    for stream in (False, True):
        assert message in refusal(server.post("/v1/responses", body | {"stream": stream}))


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "order=up", "after=nothing"])
def test_wrong_queries(server: StubServer, query: str) -> None:
    id = server.post("/v1/responses", {"input": "x", "max_output_tokens": 1}).json()["id"]
    assert query.partition("=")[0] in refusal(server.get(f"/v1/responses/{id}/input_items?{query}"))
    assert "stream" in refusal(server.get(f"/v1/responses/{id}?stream=perhaps"))
    assert "background" in refusal(server.get(f"/v1/responses/{id}?stream=true"))
    assert "Cannot cancel a synchronous response." in refusal(server.post(f"/v1/responses/{id}/cancel"))


def test_deep_and_huge_bodies(server: StubServer) -> None:
    deep = b'{"input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    headers = {"Content-Type": "application/json"}
    assert httpx.post(f"{server.url}/v1/responses", content=deep, headers=headers).status_code == 400
    schema: Any = {}
    for _ in range(200):
        schema = {"type": "object", "properties": {"a": schema}}
    body = {"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}
    assert server.post("/v1/responses", body).status_code == 400
    assert server.post("/v1/responses", {"input": [{"role": "user", "content": ""}] * 9000}).status_code == 400


def test_a_deadline_ends_a_stream_with_its_own_event() -> None:
    with stub_server(stub_engine(0.01), ServerConfig(request_timeout=0.3)) as server:
        events = list(server.client().responses.create(model=MODEL, input="?", stream=True, max_output_tokens=5000))
        assert events[-1].type == "response.failed" and events[-1].response.error.code == "timeout"
        assert server.post("/v1/responses", {"input": "?", "max_output_tokens": 5000}).status_code == 504
