"""Generated tokens as responses: /derender, of whole responses and of streams."""

import json
from typing import Any

import pytest

from quire.config.server import ServerConfig
from tests.entrypoints.openai.test_parsed_chat import says
from tests.entrypoints.openai.test_vllm_routes import HELLO, body
from tests.entrypoints.stub_server import StubServer, stub_engine, stub_server

CHAT, COMPLETION = "/v1/chat/completions/derender", "/v1/completions/derender"


def chunk(**fields: Any) -> dict[str, Any]:
    return {"stream": True, "generate_chunk": {"choices": [{"index": 0} | fields]}}


def refused(server: StubServer, path: str, request: dict[str, Any]) -> str:
    """The parameter that is wrong."""
    response = server.post(path, request)
    assert response.status_code == 400, response.text
    return str(response.json()["error"]["param"])


def test_generated_tokens_become_a_chat_response(server: StubServer) -> None:
    request = {"messages": HELLO, "max_tokens": 4, "logprobs": True, "top_logprobs": 1, "n": 2}
    rendered = body(server, "/v1/chat/completions/render", **request)
    generated = body(server, "/inference/v1/generate", **rendered)
    ids = rendered["token_ids"]
    derendered = {"generate_response": generated, "prompt_token_ids": ids, "prompt_tokens": len(ids)}
    made = body(server, CHAT, **derendered, chat_request=request)
    whole = body(server, "/v1/chat/completions", **request)
    assert (made["choices"], made["usage"]) == (whole["choices"], whole["usage"])
    assert made["id"] == generated["request_id"] and made["object"] == "chat.completion"
    plain = body(server, CHAT, generate_response=generated, prompt_tokens=7)
    assert [one["message"]["content"] for one in plain["choices"]] == [
        one["message"]["content"] for one in whole["choices"]
    ]
    assert plain["usage"]["prompt_tokens"] == 7


def test_generated_calls_are_parsed() -> None:
    with stub_server(says("<think>Hm.</think>It is noon."), ServerConfig(reasoning_parser="qwen3")) as server:
        request = {"messages": HELLO, "max_tokens": 50}
        rendered = body(server, "/v1/chat/completions/render", **request)
        generated = body(server, "/inference/v1/generate", **rendered)
        made = body(server, CHAT, generate_response=generated, chat_request=request)["choices"][0]["message"]
        assert (made["reasoning"], made["content"]) == ("Hm.", "It is noon.")


def test_generated_tokens_become_a_completion(server: StubServer) -> None:
    request = {"prompt": ["one", "two"], "max_tokens": 3, "logprobs": 1}
    rendered = body(server, "/v1/completions/render", **request)
    generated = [body(server, "/inference/v1/generate", **one) for one in rendered]
    made = body(
        server,
        COMPLETION,
        generate_responses=generated,
        prompt_token_ids=[one["token_ids"] for one in rendered],
        prompt_tokens=[len(one["token_ids"]) for one in rendered],
        completion_request=request,
    )
    whole = body(server, "/v1/completions", **request)
    assert (made["choices"], made["usage"]) == (whole["choices"], whole["usage"])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"stream": True}, "generate_chunk"),
        ({"stream": True, "generate_chunk": {"choices": [{"index": 0}, {"index": 1}]}}, "choices"),
        (
            {
                "stream": True,
                "generate_chunk": {"choices": [{"index": 0, "token_ids": [5]}]},
                "stream_state": {"output_token_ids": [10**8]},
            },
            "token_ids",
        ),
        ({"generate_response": {"choices": []}}, "choices"),
        ({"generate_response": {"choices": [{"index": 1, "token_ids": [5]}]}}, "choices"),
        ({"generate_response": {"choices": [{"index": 0, "token_ids": []}]}}, "token_ids"),
        ({"generate_response": {"choices": [{"index": 0, "token_ids": [10**8]}]}}, "token_ids"),
        ({"generate_response": {"choices": [{"index": 0, "token_ids": [5]}], "output_mode": "text"}}, "output_mode"),
        ({"chat_request": {"messages": []}}, "messages"),
    ],
)
def test_tokens_that_cannot_become_a_response(server: StubServer, fields: dict[str, Any], named: str) -> None:
    request = {"generate_response": {"choices": [{"index": 0, "token_ids": [5]}]}} | fields
    assert server.post(CHAT, request).json()["error"]["param"] == named


def derendered_stream(server: StubServer, path: str, request: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The choices of a stream that another server has generated."""
    rendered = body(server, f"{path}/render", **request)
    rendered = rendered[0] if isinstance(rendered, list) else rendered
    lines = server.post("/inference/v1/generate", rendered | {"stream": True}).text.strip().split("\n\n")
    state, found = None, []
    for line in lines[:-1]:
        fields = {"generate_chunk": json.loads(line.removeprefix("data: ")), "stream": True, "stream_state": state}
        made = body(server, f"{path}/derender", **fields, **{name: request, "prompt_token_ids": rendered["token_ids"]})
        state = made["stream_state"]
        found += made["chunk"]["choices"]
    return found


def test_a_generated_stream_becomes_a_chat_stream() -> None:
    with stub_server(says("<think>Hm.</think>It is noon, naïvely."), ServerConfig(reasoning_parser="qwen3")) as server:
        request: dict[str, Any] = {"messages": HELLO, "max_tokens": 50, "logprobs": True}
        choices = derendered_stream(server, "/v1/chat/completions", request, "chat_request")
    deltas = [choice["delta"] for choice in choices]
    assert [delta["role"] for delta in deltas if "role" in delta] == ["assistant"]
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == "Hm."
    assert "".join(delta.get("content") or "" for delta in deltas) == "It is noon, naïvely."
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    assert all(choice["logprobs"]["content"] for choice in choices)


def test_a_generated_stream_becomes_a_stream_of_text(server: StubServer) -> None:
    request = {"prompt": "one", "max_tokens": 5}
    choices = derendered_stream(server, "/v1/completions", request, "completion_request")
    whole = body(server, "/v1/completions", **request)["choices"][0]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert choices[-1]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "usage", [{"completion_tokens": "x"}, {"prompt_tokens": [1]}, {"prompt_tokens": -5}, {"completion_tokens": 2**62}]
)
def test_a_usage_that_counts_no_tokens(server: StubServer, usage: dict[str, Any]) -> None:
    request = {"stream": True, "generate_chunk": {"choices": [], "usage": usage}}
    for path in (CHAT, COMPLETION):
        assert "generate_chunk" in refused(server, path, request)


def test_logprobs_of_other_tokens(server: StubServer) -> None:
    for entry in (
        {"token_id": 6, "logprob": -1},
        {"token_id": 5, "logprob": -1, "top_logprobs": [{"token_id": 10**8, "logprob": -1}]},
    ):
        generated = {"choices": [{"index": 0, "token_ids": [5], "logprobs": {"content": [entry]}}]}
        assert "logprobs" in refused(server, COMPLETION, {"generate_responses": [generated]})
        assert "logprobs" in refused(server, CHAT, {"generate_response": generated})


def test_parts_of_a_message_that_are_no_text() -> None:
    messages = [{"role": "assistant", "content": [{"text": 5}, {"text": "a"}]}]
    request = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    with stub_server(stub_engine(), ServerConfig(reasoning_parser="qwen3")) as server:
        generated = {"choices": [{"index": 0, "token_ids": [5]}]}
        body(server, CHAT, generate_response=generated, chat_request=request)


def test_the_parameters_are_those_of_the_request(server: StubServer) -> None:
    request = {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
    first = body(server, CHAT, **chunk(token_ids=[]), chat_request=request)
    assert first["chunk"]["choices"][0]["delta"]["role"] == "assistant"
    generated = [{"choices": [{"index": 0, "token_ids": [5]}]}] * 2
    fields = {"prompt": "x", "n": 2, "best_of": 2}
    made = body(server, COMPLETION, generate_responses=generated, completion_request=fields)
    assert [choice["index"] for choice in made["choices"]] == [0, 1]
    assert refused(server, COMPLETION, {"generate_responses": generated, "completion_request": fields | {"n": 1}})


def test_only_whole_responses_end_by_default(server: StubServer) -> None:
    for path in (CHAT, COMPLETION):
        made = body(server, path, **chunk(token_ids=[500]))["chunk"]["choices"][0]
        assert made["finish_reason"] is None
    whole = body(server, CHAT, generate_response={"choices": [{"index": 0, "token_ids": [500]}]})
    assert whole["choices"][0]["finish_reason"] == "stop"


def test_a_parser_needs_the_request() -> None:
    request = {"messages": HELLO}
    with stub_server(stub_engine(), ServerConfig(reasoning_parser="qwen3")) as server:
        generated = {"choices": [{"index": 0, "token_ids": [5]}]}
        assert refused(server, CHAT, {"generate_response": generated}) == "chat_request"
        body(server, CHAT, generate_response=generated, chat_request=request)
        part = chunk(token_ids=[5])
        assert refused(server, CHAT, part | {"prompt_token_ids": [7]}) == "chat_request"
        assert refused(server, CHAT, part | {"chat_request": request}) == "prompt_token_ids"
        body(server, CHAT, **part, chat_request=request, prompt_token_ids=[7])
        body(server, COMPLETION, **part)


def test_the_client_says_how_long_the_prompt_was(server: StubServer) -> None:
    generated = {"choices": [{"index": 0, "token_ids": [5]}]}
    suffix = body(server, CHAT, generate_response=generated, prompt_token_ids=[7, 8])
    assert suffix["usage"]["prompt_tokens"] == 0 and suffix["usage"]["total_tokens"] == 1
    last = {"stream": True, "generate_chunk": {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}}
    for given, count in (({}, 3), ({"prompt_tokens": 9}, 9), ({"prompt_tokens": 0}, 0)):
        usage = body(server, CHAT, **last, **given, prompt_token_ids=[7, 8])["chunk"]["usage"]
        assert usage == {"prompt_tokens": count, "completion_tokens": 4, "total_tokens": count + 4}


def test_each_response_counts_as_a_request() -> None:
    generated = {"choices": [{"index": 0, "token_ids": [5]}]}
    with stub_server(stub_engine(), ServerConfig(rate_limit_requests=3)) as server:
        assert server.post(COMPLETION, {"generate_responses": [generated] * 4}).status_code == 429
        body(server, COMPLETION, generate_responses=[generated] * 2)
        assert server.post(CHAT, {"generate_response": generated}).status_code == 429
