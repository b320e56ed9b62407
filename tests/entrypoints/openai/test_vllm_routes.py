"""vLLM's routes beside OpenAI's: served, served with a flag, or refused by the name of what is missing."""

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.config.server import ServerConfig
from quire.entrypoints.http.body import BodyReader
from quire.entrypoints.http.errors import ApiError
from quire.entrypoints.http.route_table import NOT_YET, WITH_FLAG, WORKS
from quire.entrypoints.openai.invocations import InvocationsEndpoint
from tests.entrypoints.stub_server import MODEL, StubServer, stub_engine, stub_server

HELLO = [{"role": "user", "content": "Hello"}]
BYE = [{"role": "user", "content": "Goodbye then"}]


def body(server: StubServer, path: str, **fields: Any) -> Any:
    response = server.post(path, fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_every_route_says_what_it_is(server: StubServer) -> None:
    for path, methods in WORKS.items():
        for method in methods:
            response = server.get(path) if method == "GET" else server.post(path, {})
            expected = (200, 400) if "{" not in path else (404,)  # there is no response of that id
            assert response.status_code in expected, (path, response.text)
    for path, (methods, flag) in WITH_FLAG.items():
        response = server.get(path) if methods == ("GET",) else server.post(path, {})
        assert response.status_code == 404 and flag in response.json()["error"]["message"]
    for path, (methods, feature) in NOT_YET.items():
        response = server.get(path) if methods == ("GET",) else server.post(path, {})
        assert response.status_code == 501 and response.headers["x-should-retry"] == "false"
        assert response.json()["error"]["message"].endswith(f"not available yet: {feature}")


def test_the_docs_list_every_route() -> None:
    page = (Path(__file__).parents[3] / "docs" / "http.md").read_text("utf-8")
    rows = re.findall(
        r"^\| ([A-Z]+(?: and [A-Z]+)*) \| `(/[^`]*)` \| .*?(?:with `(--[\w-]+)`)? \|$", page, re.MULTILINE
    )
    expected = [(" and ".join(methods), path, "") for path, methods in WORKS.items()]
    expected += [(" and ".join(methods), path, flag) for path, (methods, flag) in WITH_FLAG.items()]
    assert [row[:2] for row in rows] == [row[:2] for row in expected]
    assert [row[2] for row in rows if row[1] in WITH_FLAG] == [flag for _, flag in WITH_FLAG.values()]
    later = {
        path: what
        for what, paths in re.findall(r"^\| ([^|]*) \| (`/[^|]*`) \|$", page, re.MULTILINE)
        for path in paths.split(", ")
    }
    assert later == {f"`{path}`": what for path, (_, what) in NOT_YET.items()}


def test_the_documentation_needs_nothing_from_elsewhere(server: StubServer) -> None:
    for path in ("/docs", "/redoc"):
        page = server.get(path)
        assert page.headers["content-type"].startswith("text/html") and "openapi.json" in page.text
        assert "http://" not in page.text and "https://" not in page.text
    with stub_server(stub_engine(), ServerConfig(disable_fastapi_docs=True)) as quiet:
        assert {quiet.get(path).status_code for path in ("/docs", "/redoc", "/openapi.json")} == {404}


def test_tokenizer_info() -> None:
    with stub_server(stub_engine(), ServerConfig(enable_tokenizer_info_endpoint=True)) as server:
        info = server.get("/tokenizer_info").json()
        longest = server.post("/tokenize", {"prompt": "a"}).json()["max_model_len"]
    assert info["tokenizer_class"] and info["model_max_length"] == longest
    assert "messages" in info["chat_template"]


def test_tokenizer_info_has_the_template_of_a_file(tmp_path: Path) -> None:
    template = "{{ messages[-1].content }}"
    engine = stub_engine()
    engine.config.model.chat_template = str(tmp_path / "chat.jinja")
    (tmp_path / "chat.jinja").write_text(template)
    with stub_server(engine, ServerConfig(enable_tokenizer_info_endpoint=True)) as server:
        assert server.get("/tokenizer_info").json()["chat_template"] == template


def test_profiles_of_an_engine_with_a_profiler() -> None:
    engine, called = stub_engine(), []

    async def start() -> None:
        called.append("start")

    async def stop() -> None:
        called.append("stop")

    engine.start_profile, engine.stop_profile = start, stop
    engine.config.observability.profiler_config = {"profiler": "torch"}
    with stub_server(engine) as server:
        assert [server.post(f"/{name}_profile").status_code for name in ("start", "stop")] == [200, 200]
    assert called == ["start", "stop"]


def test_invocations_go_to_the_endpoint_whose_field_they_have(server: StubServer) -> None:
    assert body(server, "/invocations", messages=HELLO, max_tokens=2)["object"] == "chat.completion"
    assert body(server, "/invocations", prompt=[7, 8], max_tokens=2)["object"] == "text_completion"
    streamed = server.post("/invocations", {"prompt": [7, 8], "max_tokens": 2, "stream": True})
    assert streamed.text.endswith("data: [DONE]\n\n")
    untyped = server.post("/invocations", content=b"{}", headers={"content-type": "text/plain"})
    assert untyped.status_code == 415
    refused = server.post("/invocations", {"input": "x"})
    assert refused.status_code == 400 and "messages, prompt" in refused.json()["error"]["message"]
    deep = b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    refused = server.post("/invocations", content=deep, headers={"content-type": "application/json"})
    assert refused.status_code == 400 and refused.json()["error"]["message"] == "the body is nested too deeply"


@pytest.mark.parametrize("content_type", [b"text/plain", b"application/json"])
def test_invocations_read_and_keep_no_more_than_needed(content_type: bytes) -> None:
    """A wrong type is refused before the body is read; a body handed over is not kept."""
    kept: list[int] = []

    async def endpoint(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        kept.append(sys.getrefcount(message["body"]))

    async def receive() -> Any:
        assert content_type == b"application/json"
        return {"type": "http.request", "body": b'{"prompt": "a text that is long"}'}

    invocations = InvocationsEndpoint(BodyReader(ServerConfig(), 100), {"prompt": endpoint})
    call = invocations({"type": "http", "headers": [(b"content-type", content_type)]}, receive, receive)
    if content_type == b"text/plain":
        with pytest.raises(ApiError, match="application/json"):
            asyncio.run(call)
    else:
        asyncio.run(call)
        assert kept == [2]  # the message, and the argument of getrefcount


def test_several_conversations_in_one_request(server: StubServer) -> None:
    answer = body(server, "/v1/chat/completions/batch", messages=[HELLO, BYE], max_tokens=3, logprobs=True)
    single = [body(server, "/v1/chat/completions", messages=one, max_tokens=3) for one in (HELLO, BYE)]
    assert [one["index"] for one in answer["choices"]] == [0, 1]
    found = [one["message"]["content"] for one in answer["choices"]]
    assert found == [one["choices"][0]["message"]["content"] for one in single]
    assert answer["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in single)
    assert len(answer["choices"][1]["logprobs"]["content"]) == 3


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True},
        {"n": 2},
        {"tools": [{"type": "function"}]},
        {"messages": []},
        {"kv_transfer_params": {"prompt_token_ids": [1]}},
        {"continue_final_message": True},
        {"add_generation_prompt": False},
    ],
)
def test_what_a_batch_cannot_do(server: StubServer, fields: dict[str, Any]) -> None:
    response = server.post("/v1/chat/completions/batch", {"messages": [HELLO]} | fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == next(iter(fields))


def test_tokens_in_tokens_out(server: StubServer) -> None:
    params = {"max_tokens": 5, "logprobs": 0, "n": 2}
    answer = body(server, "/inference/v1/generate", token_ids=[7, 8, 9], sampling_params=params, request_id="mine")
    expected = body(server, "/v1/completions", prompt=[7, 8, 9], max_tokens=5, return_token_ids=True)
    assert answer["request_id"] == "mine" and answer["model"] == MODEL and answer["usage"]["completion_tokens"] == 10
    assert [one["token_ids"] for one in answer["choices"]] == 2 * [expected["choices"][0]["token_ids"]]
    assert all(len(one["logprobs"]["content"]) == 5 for one in answer["choices"])


def test_logprobs_of_named_tokens(server: StubServer) -> None:
    params = {"max_tokens": 2, "logprobs": 0, "logprob_token_ids": [5, 6, 7]}
    answer = body(server, "/inference/v1/generate", token_ids=[7, 8, 9], sampling_params=params)
    for one in answer["choices"][0]["logprobs"]["content"]:
        assert [top["token_id"] for top in one["top_logprobs"]] == [5, 6, 7, one["token_id"]]


def test_tokens_with_their_text(server: StubServer) -> None:
    request: dict[str, Any] = {"token_ids": [7, 8, 9], "sampling_params": {"max_tokens": 5, "logprobs": 1}}
    request |= {"output_mode": "text", "return_token_ids": True}
    answer = body(server, "/inference/v1/generate", **request)
    (choice,) = answer["choices"]
    expected = body(server, "/v1/completions", prompt=[7, 8, 9], max_tokens=5)["choices"][0]["text"]
    assert choice["text"] == expected == "".join(one["token"] for one in choice["logprobs"]["content"])
    assert answer["prompt_token_ids"] == [7, 8, 9] and answer["output_mode"] == "text"
    lines = server.post("/inference/v1/generate", request | {"stream": True}).text.strip().split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(event["choices"][0]["text"] for event in events) == expected
    assert events[0]["prompt_token_ids"] == [7, 8, 9] and events[-1]["choices"][0]["stop_reason"] is None
    for wrong in ({"output_mode": "chat"}, {"output_mode": "text", "sampling_params": {"detokenize": False}}):
        assert server.post("/inference/v1/generate", request | wrong).json()["error"]["param"] == "output_mode"


def test_tokens_in_a_stream(server: StubServer) -> None:
    request = {"token_ids": [7, 8, 9], "sampling_params": {"max_tokens": 5}, "stream": True}
    lines = server.post("/inference/v1/generate", request).text.strip().split("\n\n")
    assert lines.pop() == "data: [DONE]"
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    assert sum(len(one["token_ids"]) for one in choices) == 5 and choices[-1]["finish_reason"] == "length"
    assert not any("text" in one for one in choices)


def test_prompt_logprobs_come_first_in_a_stream_of_tokens(server: StubServer) -> None:
    request = {"token_ids": [7, 8, 9], "sampling_params": {"max_tokens": 2, "prompt_logprobs": 0}}
    whole = body(server, "/inference/v1/generate", **request)["prompt_logprobs"]
    lines = server.post("/inference/v1/generate", request | {"stream": True}).text.strip().split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert whole is not None and events[0]["prompt_logprobs"] == whole
    assert not any("prompt_logprobs" in event for event in events[1:])
    assert sum(len(event["choices"][0]["token_ids"]) for event in events) == 2


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"temperatur": 1}, "temperatur"),
        ({"temperature": -1}, "temperature"),
        ({"stop": ["x"], "detokenize": False}, "stop_token_ids"),
        ({"n": 1000}, "--max-n"),
        ({"prompt_logprob_token_ids": [[5]]}, "prompt_logprobs"),
    ],
)
def test_wrong_sampling_params(server: StubServer, params: dict[str, Any], named: str) -> None:
    response = server.post("/inference/v1/generate", {"token_ids": [7], "sampling_params": params})
    assert response.status_code == 400 and named in response.json()["error"]["message"]


def test_a_rendered_request_generates_the_same(server: StubServer) -> None:
    request = {"messages": HELLO, "max_tokens": 4, "temperature": 0.5, "seed": 3, "return_token_offsets": True}
    rendered = body(server, "/v1/chat/completions/render", **request)
    assert rendered["sampling_params"]["temperature"] == 0.5
    assert len(rendered["token_offsets"]) == len(rendered["token_ids"])
    tokens = body(server, "/inference/v1/generate", **rendered)["choices"][0]["token_ids"]
    whole = body(server, "/v1/chat/completions", **request, return_token_ids=True)
    assert whole["prompt_token_ids"] == rendered["token_ids"] and whole["choices"][0]["token_ids"] == tokens
    assert len(body(server, "/v1/completions/render", prompt=["one", "two"])) == 2


def test_the_tokens_of_the_assistants_words() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}User: {{ m.content }}\n{% else %}"
        "{% generation %}Bot: {{ m.content }}\n{% endgeneration %}{% endif %}{% endfor %}"
    )
    messages = [
        *HELLO,
        {"role": "assistant", "content": "Hi there!"},
        *BYE,
        {"role": "assistant", "content": "See you"},
    ]
    with stub_server(stub_engine(), ServerConfig(trust_request_chat_template=True)) as server:
        request = {"messages": messages, "chat_template": template}
        rendered = body(server, "/v1/chat/completions/render", **request, return_assistant_tokens_mask=True)
        marked = [id for id, mark in zip(rendered["token_ids"], rendered["assistant_tokens_mask"], strict=True) if mark]
        assert body(server, "/detokenize", tokens=marked)["prompt"] == "Bot: Hi there!\nBot: See you\n"
        plain = body(server, "/v1/chat/completions/render", **request)
        assert plain["token_ids"] == rendered["token_ids"] and plain["assistant_tokens_mask"] is None
        request |= {
            "add_generation_prompt": False,
            "continue_final_message": True,
            "return_assistant_tokens_mask": True,
        }
        assert body(server, "/v1/chat/completions/render", **request)["assistant_tokens_mask"][-1] == 1
        unmarked = {"messages": messages, "return_assistant_tokens_mask": True}  # the model's own template has no tags
        assert body(server, "/v1/chat/completions/render", **unmarked)["assistant_tokens_mask"] is None


def test_no_message_forges_the_assistants_words() -> None:
    template = "{% for m in messages %}{{ m.content }}{% generation %}Bot{% endgeneration %}{% endfor %}"
    words = "a\ue000\ue002b\ue002\ue000c"
    with stub_server(stub_engine(), ServerConfig(trust_request_chat_template=True)) as server:
        request = {"messages": [{"role": "user", "content": words}], "chat_template": template}
        marked = body(server, "/v1/chat/completions/render", **request, return_assistant_tokens_mask=True)
        assert body(server, "/detokenize", tokens=marked["token_ids"])["prompt"] == words + "Bot"
        own = [id for id, mark in zip(marked["token_ids"], marked["assistant_tokens_mask"], strict=True) if mark]
        assert body(server, "/detokenize", tokens=own)["prompt"] == "Bot"
        flags = {"return_assistant_tokens_mask": True, "chat_template_kwargs": {"marks!": ["<", ">"]}}
        answer = body(server, "/v1/chat/completions", **request, **flags, max_tokens=1, return_token_ids=True)
        assert answer["prompt_token_ids"] == marked["token_ids"]


def test_every_kind_of_parameter_is_rendered_for_generating() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    request = {"messages": HELLO, "max_tokens": 4, "response_format": form, "logit_bias": {"5": 1}, "seed": 1}
    with stub_server(stub_engine(), ServerConfig(reasoning_parser="deepseek_r1")) as server:
        rendered = body(server, "/v1/chat/completions/render", **request)
        assert json.loads(rendered["sampling_params"]["structured_outputs"]["json"]) == schema
        assert rendered["sampling_params"]["reasoning"]["end"]
        assert body(server, "/inference/v1/generate", **rendered)["usage"]["completion_tokens"] == 4
        rendered["sampling_params"]["reasoning"] = {"start": "x", "end": [1], "other": 1}
        assert server.post("/inference/v1/generate", rendered).status_code == 400


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(("name", "value"), [("watermarking", True), ("routed_experts_prompt_start", 3)])
def test_fields_of_features_to_come_are_refused(server: StubServer, path: str, name: str, value: Any) -> None:
    request: dict[str, Any] = {"messages": HELLO} if "chat" in path else {"prompt": "x"}
    error = server.post(path, request | {name: value}).json()["error"]
    assert error["param"] == name and "not available yet" in error["message"]
    assert server.post(path, request | {name: None, "max_tokens": 1}).status_code == 200


def test_the_load_in_a_header(server: StubServer) -> None:
    asked = {"endpoint-load-metrics-format": "json"}
    response = server.post("/v1/completions", {"prompt": [7], "max_tokens": 1}, headers=asked)
    report = response.headers["endpoint-load-metrics"]
    assert json.loads(report.removeprefix("JSON "))["named_metrics"]["num_requests_waiting"] == 0
    assert "endpoint-load-metrics" not in server.post("/v1/completions", {"prompt": [7], "max_tokens": 1}).headers


def test_strings_that_spell_numbers_and_booleans(server: StubServer) -> None:
    answer = body(server, "/v1/completions", prompt="a b", max_tokens="3", temperature="0.5", logprobs="1")
    assert answer["usage"]["completion_tokens"] == 3 and len(answer["choices"][0]["logprobs"]["tokens"]) == 3
    assert body(server, "/v1/completions", prompt="a b", echo="yes")["choices"][0]["text"].startswith("a b")
    assert body(server, "/v1/completions", prompt="3", max_tokens=1, stream="false")["usage"]["prompt_tokens"] == 1


def test_a_field_is_unknown_whatever_the_others_spell() -> None:
    with stub_server(stub_engine(), ServerConfig(strict_fields=True)) as server:
        for given in ({"max_tokens": "3"}, {"echo": "yes"}, {}):
            refused = server.post("/v1/completions", {"prompt": "a", "max_tokns": 3} | given)
            assert refused.status_code == 400 and refused.json()["error"]["code"] == "unknown_field"


def test_every_key_that_is_no_token_id_is_named(server: StubServer) -> None:
    response = server.post("/v1/completions", {"prompt": "a", "logit_bias": {"one": 1, "5": 1, "two": 1}})
    found = response.json()["error"]
    assert found["param"] == "logit_bias" and "'one', 'two'" in found["message"] and "'5'" not in found["message"]


def test_a_key_that_is_no_text(server: StubServer) -> None:
    for given in (
        b'{"prompt":"a","\x9b":1}',
        b'{"prompt":"a","max_tokens":"1","\x9b":1}',
        b'{"logit_bias":{"\x9b":1}}',
    ):
        refused = server.post("/v1/completions", content=given, headers={"content-type": "application/json"})
        assert refused.status_code == 400, refused.text


def test_which_side_of_a_prompt_is_cut(server: StubServer) -> None:
    ids = list(range(10, 20))
    for side, kept in (("right", ids[:4]), ("left", ids[-4:]), (None, ids[-4:])):
        answer = body(
            server,
            "/v1/completions",
            prompt=ids,
            truncate_prompt_tokens=4,
            truncation_side=side,
            return_token_ids=True,
            session_id="one",
        )
        assert answer["choices"][0]["prompt_token_ids"] == kept
    refused = server.post("/v1/completions", {"prompt": ids, "truncation_side": "middle"})
    assert refused.status_code == 400 and "left, right" in refused.text


def test_a_prompt_that_another_server_has_tokenized(server: StubServer) -> None:
    first = body(server, "/v1/chat/completions", messages=HELLO, max_tokens=3, return_token_ids=True)
    forwarded = {"prompt_token_ids": first["prompt_token_ids"]}
    second = body(
        server, "/v1/chat/completions", messages=BYE, max_tokens=3, return_token_ids=True, kv_transfer_params=forwarded
    )
    assert second["prompt_token_ids"] == first["prompt_token_ids"] and second["choices"] == first["choices"]
    for ids in (["a"], [-1], [2**40], [49152]):
        forwarded = {"prompt_token_ids": ids}
        wrong = server.post("/v1/chat/completions", {"messages": BYE, "kv_transfer_params": forwarded})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "kv_transfer_params"


def test_each_rendered_prompt_counts_as_a_request() -> None:
    with stub_server(stub_engine(), ServerConfig(rate_limit_requests=3)) as server:
        assert server.post("/v1/completions/render", {"prompt": ["one", "two", "three", "four"]}).status_code == 429
        assert len(body(server, "/v1/completions/render", prompt=["one", "two"])) == 2
        assert server.post("/v1/completions/render", {"prompt": "one"}).status_code == 429
