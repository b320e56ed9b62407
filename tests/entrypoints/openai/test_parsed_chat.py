"""Reasoning in chat responses, as the official client sees it."""

import json
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from quire.bench.internal.stub_engine import StubEngine, cycle
from quire.config.server import ServerConfig
from quire.entrypoints.parsers.reasoning import TagFormat
from quire.messages.requests import EngineCoreRequest
from tests.entrypoints.stub_server import MODEL, StubServer, stub_server

HELLO: Any = [{"role": "user", "content": "Hello"}]


def says(text: str, step_seconds: float = 0.0) -> StubEngine:
    """An engine whose every response is this text."""
    engine = StubEngine(cycle([0]), step_seconds)
    say(engine, text)
    return engine


def say(engine: StubEngine, text: str) -> list[int]:
    assert engine.tokenizer is not None
    ids = engine.tokenizer.encode(text, add_special_tokens=False)
    ends = [*ids, engine.config.model.eos_token_ids[0]]

    def rule(request: EngineCoreRequest, count: int) -> int:
        return ends[min(count, len(ids))]

    engine.rule = rule
    return ids


@pytest.fixture(scope="module")
def thinker() -> Iterator[StubServer]:
    with stub_server(says(""), ServerConfig(reasoning_parser="qwen3", trust_request_chat_template=True)) as one:
        yield one


@pytest.fixture(scope="module")
def special() -> Iterator[StubServer]:
    """Its tags are special tokens, which are skipped in text."""
    module = types.ModuleType("special_reasoning")
    module.FORMAT = TagFormat(("<issue_start>",), ("<issue_closed>",))  # type: ignore[attr-defined]
    sys.modules["special_reasoning"] = module
    with stub_server(says(""), ServerConfig(reasoning_parser="special_reasoning:FORMAT")) as one:
        yield one
    del sys.modules["special_reasoning"]


TOOL: Any = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'


@pytest.fixture(scope="module")
def caller() -> Iterator[StubServer]:
    config = ServerConfig(reasoning_parser="qwen3", tool_call_parser="hermes", enable_auto_tool_choice=True)
    with stub_server(says(""), config) as one:
        yield one


def whole(server: StubServer, messages: Any = HELLO, **kwargs: Any) -> Any:
    return server.client().chat.completions.create(model=MODEL, messages=messages, **kwargs)


def streamed(server: StubServer, **kwargs: Any) -> list[Any]:
    return list(server.client().chat.completions.create(model=MODEL, messages=HELLO, stream=True, **kwargs))


def joined(chunks: list[Any], name: str, index: int = 0) -> str:
    deltas = [one.delta for chunk in chunks for one in chunk.choices if one.index == index]
    return "".join(getattr(delta, name, None) or "" for delta in deltas)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nWell, 1 < 2.\n</think>\n\nYes, less.", "\nWell, 1 < 2.\n", "\n\nYes, less."),
        ("<think>\n\n</think>\n\nYes.", "\n\n", "\n\nYes."),
        ("<think></think>Yes.", "", "Yes."),
        ("<think>Well, I", "Well, I", ""),
        ("Yes, <think>less</think>", "", "Yes, <think>less</think>"),
        ("<think>Well</thin", "Well</thin", ""),
        ("<thi", "", "<thi"),
    ],
)
def test_whole_and_streamed(thinker: StubServer, text: str, reasoning: str, content: str) -> None:
    say(thinker.engine, text)
    message = whole(thinker).choices[0].message
    assert (message.content or "") == content and message.tool_calls is None
    assert (message.reasoning or "") == (message.reasoning_content or "") == reasoning
    chunks = streamed(thinker)
    assert (joined(chunks, "reasoning"), joined(chunks, "content")) == (reasoning, content)
    assert joined(chunks, "reasoning_content") == reasoning
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason == "stop"
    kinds = [one for chunk in chunks if (one := set(chunk.choices[0].delta.model_dump(exclude_none=True)))]
    assert all(one in ({"role", "content"}, {"content"}, {"reasoning", "reasoning_content"}) for one in kinds)


def test_content_is_null_while_there_is_only_reasoning(thinker: StubServer) -> None:
    ids = say(thinker.engine, "<think>Well, I wonder</think>Yes.")
    choice = whole(thinker, max_tokens=len(ids) - 6).choices[0]
    assert choice.message.content is None and choice.message.reasoning and choice.finish_reason == "length"


def test_reasoning_that_is_not_wanted(thinker: StubServer) -> None:
    say(thinker.engine, "<think>Well</think>Yes.")
    message = whole(thinker, extra_body={"include_reasoning": False}).choices[0].message
    assert message.content == "Yes." and message.reasoning is None and message.reasoning_content is None
    chunks = streamed(thinker, extra_body={"include_reasoning": False})
    assert joined(chunks, "content") == "Yes." and joined(chunks, "reasoning") == ""


def test_the_prompt_decides_whether_reasoning_is_open(thinker: StubServer) -> None:
    say(thinker.engine, "Well</think>Yes.")
    template = "{{ messages[0].content }}{{ '<think>\n' if think else '<think>\n\n</think>\n\n' }}"
    for think, reasoning, content in ((True, "Well", "Yes."), (False, None, "Well</think>Yes.")):
        extra = {"chat_template": template, "chat_template_kwargs": {"think": think}}
        message = whole(thinker, extra_body=extra).choices[0].message
        assert (message.reasoning, message.content) == (reasoning, content)
        assert joined(streamed(thinker, extra_body=extra), "content") == content


def test_continuing_inside_the_reasoning(thinker: StubServer) -> None:
    say(thinker.engine, " I wonder</think>Yes.")
    messages = [*HELLO, {"role": "assistant", "content": "<think>Well,"}]
    message = whole(thinker, messages, extra_body={"continue_final_message": True}).choices[0].message
    assert (message.reasoning, message.content) == (" I wonder", "Yes.")
    messages[-1]["content"] = "<think>Well,</think>"
    message = whole(thinker, messages, extra_body={"continue_final_message": True}).choices[0].message
    assert (message.reasoning, message.content) == (None, " I wonder</think>Yes.")


def test_the_response_can_be_sent_back(thinker: StubServer) -> None:
    say(thinker.engine, "<think>Well</think>Yes.")
    response = whole(thinker).choices[0].message
    template = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.content }};{% endfor %}"
    extra = {"chat_template": template, "return_token_ids": True, "add_generation_prompt": False}
    message = {"role": "assistant", "content": response.content, "reasoning": response.reasoning}
    given = whole(thinker, [message], extra_body=extra)
    assert thinker.engine.tokenizer is not None
    assert thinker.engine.tokenizer.decode(given.prompt_token_ids) == "Well|Yes.;"


def test_choices_are_parsed_one_by_one(thinker: StubServer) -> None:
    say(thinker.engine, "<think>Well</think>Yes.")
    for choice in whole(thinker, n=3).choices:
        assert (choice.message.reasoning, choice.message.content) == ("Well", "Yes.")
    chunks = streamed(thinker, n=3)
    for index in range(3):
        assert (joined(chunks, "reasoning", index), joined(chunks, "content", index)) == ("Well", "Yes.")


def test_logprobs_of_all_tokens(thinker: StubServer) -> None:
    ids = say(thinker.engine, "<think>Well</think>Yes.")
    content = whole(thinker, logprobs=True).choices[0].logprobs.content
    assert len(content) == len(ids) + 1  # and the EOS
    chunks = streamed(thinker, logprobs=True)
    parts = [one.logprobs.content for chunk in chunks for one in chunk.choices if one.logprobs]
    assert [token for part in parts for token in part] == content
    shown = streamed(thinker, extra_body={"return_token_ids": True})
    told = [token for chunk in shown for token in getattr(chunk.choices[0], "token_ids", None) or []]
    assert told[:-1] == ids


def test_stop_strings_and_the_clients_stream_helper(thinker: StubServer) -> None:
    say(thinker.engine, "<think>Well</think>Yes. No.")
    with thinker.client().chat.completions.stream(model=MODEL, messages=HELLO, stop=" No") as stream:
        final = stream.get_final_completion().choices[0]
    assert final.message.content == "Yes." and final.finish_reason == "stop"


def test_tags_that_are_special_tokens(special: StubServer) -> None:
    ids = say(special.engine, "<issue_start>Well, well<issue_closed>Yes.<file_sep>")
    response = whole(special)
    message = response.choices[0].message
    assert (message.reasoning, message.content) == ("Well, well", "Yes.")  # other special tokens stay hidden
    tokenizer = special.engine.tokenizer
    assert tokenizer is not None
    count = len(tokenizer.encode("Well, well", add_special_tokens=False))
    assert response.usage.completion_tokens == len(ids) + 1
    assert response.usage.completion_tokens_details.reasoning_tokens == count
    chunks = streamed(special, stream_options={"include_usage": True})
    assert (joined(chunks, "reasoning"), joined(chunks, "content")) == ("Well, well", "Yes.")
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == count
    say(special.engine, "Yes.")
    assert whole(special).usage.completion_tokens_details.reasoning_tokens == 0


def test_the_engine_receives_the_reasoning_tags(special: StubServer) -> None:
    """For grammars, which apply after it, and for the thinking budget."""
    say(special.engine, "Yes.")
    seen: list[EngineCoreRequest] = []
    rule = special.engine.rule

    def watching(request: EngineCoreRequest, count: int) -> int:
        seen.append(request)
        return rule(request, count)

    special.engine.rule = watching
    whole(special, extra_body={"thinking_token_budget": 7})
    params, tokenizer = seen[0].params, special.engine.tokenizer
    assert tokenizer is not None and params.reasoning is not None
    assert params.thinking_token_budget == 7 and params.reasoning.open is None
    assert params.reasoning.end == [tokenizer.special_id("<issue_closed>")]
    seen.clear()
    special.post("/v1/completions", {"prompt": "So", "thinking_token_budget": 7})
    assert (seen[0].params.thinking_token_budget, seen[0].params.reasoning) == (7, params.reasoning)


def test_what_ends_reasoning_where_a_budget_does(special: StubServer) -> None:
    config = {"reasoning_parser": "special_reasoning:FORMAT", "reasoning_end_str": "Enough.<issue_closed>"}
    with stub_server(says("Yes."), ServerConfig(reasoning_config=config)) as server:
        rendered = server.post("/v1/chat/completions/render", {"messages": HELLO, "thinking_token_budget": 7}).json()
        tags, tokenizer = rendered["sampling_params"]["reasoning"], server.engine.tokenizer
    assert tokenizer is not None and tags["end"] == [tokenizer.special_id("<issue_closed>")]
    assert tags["budget_end"] == tokenizer.encode("Enough.<issue_closed>", add_special_tokens=False)
    with stub_server(says("Yes."), ServerConfig(reasoning_config=config)) as server:
        completion = {"prompt": "x", "thinking_token_budget": 7}
        rendered = server.post("/v1/completions/render", completion).json()
        assert rendered[0]["sampling_params"]["reasoning"]["budget_end"] == tags["budget_end"]
        (foreign := dict(tags))["budget_end"] = [2_000_000_000]
        params = rendered[0]["sampling_params"] | {"reasoning": foreign}
        response = server.post("/inference/v1/generate", {"token_ids": [1], "sampling_params": params})
        assert response.status_code == 400 and "reasoning" in response.json()["error"]["message"]
    with pytest.raises(ValueError, match=r"reasoning_config has end; allowed.*reasoning_end_str"):
        ServerConfig(reasoning_config={"end": "x"})
    for wrong, message in (("start", "allowed: one"), ("end", "more than 256 tokens")):
        given = config | {f"reasoning_{wrong}_str": "many words " * 200}
        with pytest.raises(ValueError, match=message), stub_server(says(""), ServerConfig(reasoning_config=given)):
            pass


def test_a_budget_needs_a_parser() -> None:
    with stub_server(says("Yes.")) as plain, pytest.raises(openai.BadRequestError, match="--reasoning-parser") as error:
        whole(plain, extra_body={"thinking_token_budget": 7})
    assert error.value.param == "thinking_token_budget"


def test_a_budget_needs_tags_that_are_tokens(thinker: StubServer) -> None:
    with pytest.raises(openai.BadRequestError, match="'</think>' are not single tokens of this model") as error:
        whole(thinker, extra_body={"thinking_token_budget": 7})
    assert error.value.param == "thinking_token_budget"


def test_responses_without_a_parser_have_no_new_fields() -> None:
    with stub_server(says("<think>Well</think>Yes.")) as plain:
        body = plain.post("/v1/chat/completions", {"messages": HELLO}).json()
        message = body["choices"][0]["message"]
        assert {name for name, value in message.items() if value is not None} == {"role", "content"}
        assert body["usage"]["completion_tokens_details"] is None


def test_an_aborted_stream_flushes_held_back_text() -> None:
    engine = says("<think>Well</thin", step_seconds=0.005)
    said, eos = engine.rule, engine.config.model.eos_token_ids[0]
    silent = threading.Event()

    def endless(request: EngineCoreRequest, count: int) -> int:
        token = said(request, count)
        if token == eos:
            silent.set()
        return token

    engine.rule = endless
    with stub_server(engine, ServerConfig(reasoning_parser="qwen3", enable_admin=True)) as slow:
        stream = slow.client().chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = [next(stream)]
        assert silent.wait(20)
        slow.post("/abort_requests", {"request_ids": [chunks[0].id]})
        chunks += stream
    assert joined(chunks, "reasoning") == "Well</thin" and chunks[-1].choices[0].finish_reason == "abort"


def test_an_unknown_parser_is_refused() -> None:
    with (
        pytest.raises(ValueError, match="--reasoning-parser nothing is not known"),
        stub_server(says(""), ServerConfig(reasoning_parser="nothing")),
    ):
        pass


def test_events_are_json_lines(thinker: StubServer) -> None:
    say(thinker.engine, '<think>"é\n\\</think>"\u2028</b>')
    response = thinker.post("/v1/chat/completions", {"messages": HELLO, "stream": True})
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines[:-1]]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == '"é\n\\'
    assert "".join(delta.get("content", "") for delta in deltas) == '"\u2028</b>'


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (CALL, "", "", 1),
        (f"<think>What time is it?</think>\n\n{CALL}\n{CALL}", "What time is it?", "", 2),
        (f"<think>Try {CALL}</think>I will look.\n{CALL}", f"Try {CALL}", "I will look.", 1),
        ("<think>Well</think>No call.", "Well", "No call.", 0),
    ],
)
def test_tool_calls_after_the_reasoning(
    caller: StubServer, text: str, reasoning: str, content: str, calls: int
) -> None:
    say(caller.engine, text)
    choice = whole(caller, tools=[TOOL]).choices[0]
    message, finish = choice.message, "tool_calls" if calls else "stop"
    assert (message.content or "", message.reasoning or "", choice.finish_reason) == (content, reasoning, finish)
    if calls:
        assert [call.function.name for call in message.tool_calls] == ["now"] * calls
        assert {json.loads(call.function.arguments)["zone"] for call in message.tool_calls} == {"UTC"}
        assert len({call.id for call in message.tool_calls}) == calls
        assert content or message.content is None
    else:
        assert message.tool_calls is None

    chunks = streamed(caller, tools=[TOOL])
    assert (joined(chunks, "content"), joined(chunks, "reasoning")) == (content, reasoning)
    assert chunks[-1].choices[0].finish_reason == finish
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    first = [call for call in deltas if call.id is not None]
    assert [(call.index, call.type, call.function.name) for call in first] == [
        (index, "function", "now") for index in range(calls)
    ]
    for index in range(calls):
        arguments = "".join(call.function.arguments or "" for call in deltas if call.index == index)
        assert arguments == message.tool_calls[index].function.arguments
    assert all(call.function.name is None and call.type is None for call in deltas if call.id is None)


def test_the_clients_helper_puts_calls_together(caller: StubServer) -> None:
    say(caller.engine, f"<think>Well</think>{CALL}{CALL}")
    with caller.client().chat.completions.stream(model=MODEL, messages=HELLO, tools=[TOOL]) as stream:
        message = stream.get_final_completion().choices[0].message
    assert [json.loads(call.function.arguments) for call in message.tool_calls or []] == [{"zone": "UTC"}] * 2


def test_without_tools_a_call_is_text(caller: StubServer) -> None:
    say(caller.engine, CALL)
    assert whole(caller).choices[0].message.content == CALL
    assert whole(caller, tools=[TOOL], tool_choice="none").choices[0].message.content == CALL
