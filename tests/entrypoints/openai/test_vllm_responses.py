"""Responses as clients of vLLM read them: its keys, its flags, usage and the last chunk of a stream."""

import json
from typing import Any

import httpx
import pytest

from quire.config.server import ServerConfig
from quire.engine.output_processor import OutputProcessor
from quire.entrypoints.openai.response import timing
from quire.metrics.request import RequestMetrics
from quire.metrics.spec_decode import SpecDecodeMetrics
from tests.entrypoints.stub_server import StubServer, stub_engine, stub_server

HELLO = [{"role": "user", "content": "Hello"}]
COMPLETION = {"id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage"}
COMPLETION |= {"kv_transfer_params", "ec_transfer_params", "metrics"}
CHAT = COMPLETION | {"prompt_logprobs", "prompt_token_ids", "prompt_text"}
CHOICE = {"index", "logprobs", "finish_reason", "stop_reason", "token_ids", "routed_experts"}
USAGE = {"prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details", "completion_tokens_details"}
MESSAGE = {"role", "content", "refusal", "annotations", "audio", "function_call", "reasoning"}


def served(**flags: Any) -> Any:
    return stub_server(stub_engine(), ServerConfig(**flags))


def complete(server: StubServer, **fields: Any) -> dict[str, Any]:
    response = server.post("/v1/completions", {"prompt": [7, 8, 9], "max_tokens": 4} | fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def chunks(server: StubServer, path: str = "/v1/completions", **fields: Any) -> list[dict[str, Any]]:
    prompt: dict[str, Any] = {"prompt": [7, 8, 9]} if path == "/v1/completions" else {"messages": HELLO}
    response = server.post(path, prompt | {"max_tokens": 4, "stream": True} | fields)
    assert response.status_code == 200, response.text
    data = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [json.loads(one) for one in data]


def test_whole_responses_have_every_key(server: StubServer) -> None:
    body = complete(server)
    assert set(body) == COMPLETION and set(body["usage"]) == USAGE
    assert set(body["choices"][0]) == CHOICE | {"text", "prompt_logprobs", "prompt_token_ids"}
    chat = server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 4}).json()
    assert set(chat) == CHAT
    assert set(chat["choices"][0]) == CHOICE | {"message"} and set(chat["choices"][0]["message"]) == MESSAGE


def test_the_prompt_as_rendered(server: StubServer) -> None:
    body = server.post("/v1/chat/completions", {"messages": HELLO, "return_prompt_text": True}).json()
    assert "Hello" in body["prompt_text"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_last_token_comes_with_the_finish_reason(server: StubServer, path: str) -> None:
    found = [one["choices"][0] for one in chunks(server, path, return_token_ids=True)]
    assert [one["finish_reason"] for one in found if one["finish_reason"]] == ["length"]
    assert found[-1]["finish_reason"] == "length" and found[-1]["token_ids"] and found[-1]["stop_reason"] is None
    assert found[-1].get("text") or found[-1]["delta"]["content"]


def test_continuous_usage_is_of_one_choice(server: StubServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = chunks(server, n=2, stream_options=options, return_token_ids=True)
    totals = {0: 0, 1: 0}
    for chunk in found[:-1]:
        choice = chunk["choices"][0]
        totals[choice["index"]] += len(choice["token_ids"])
        generated = totals[choice["index"]]
        assert chunk["usage"] == {"prompt_tokens": 3, "completion_tokens": generated, "total_tokens": 3 + generated}
    assert found[-1]["choices"] == [] and found[-1]["usage"]["completion_tokens"] == 8


def test_force_include_usage() -> None:
    with served(enable_force_include_usage=True) as server:
        found = chunks(server)
    assert all(one["usage"]["prompt_tokens"] == 3 for one in found) and found[-1]["choices"] == []


def test_prompt_tokens_details() -> None:
    with served(enable_prompt_tokens_details=True) as server:
        assert complete(server)["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_per_request_metrics(server: StubServer) -> None:
    assert complete(server)["metrics"] is None
    with served(enable_per_request_metrics=True) as server:
        assert set(complete(server)["metrics"]) == set(timing(None, 1))
        assert complete(server, n=2)["metrics"] is None
        assert "tokens_per_second" in chunks(server, stream_options={"include_usage": True})[-1]["metrics"]
    times = RequestMetrics(10.0, first_scheduled_time=10.5, first_token_time=11.0, last_token_time=12.5)
    assert timing(times, 4) == {
        "time_to_first_token_ms": 500,
        "generation_time_ms": 1500,
        "queue_time_ms": 500,
        "mean_itl_ms": 500,
        "tokens_per_second": 2,
        "speculative_decoding": None,
    }


def test_drafts_of_a_request() -> None:
    engine = stub_engine()
    engine.output_processor = OutputProcessor(engine.tokenizer, new_draft_metrics=lambda: SpecDecodeMetrics(4))
    with stub_server(engine, ServerConfig()) as server:
        found = complete(server)["metrics"]
        assert found["speculative_decoding"] == SpecDecodeMetrics(4).to_dict()
        assert found["tokens_per_second"] is None, "times are asked for by another flag"
        assert complete(server, n=2)["metrics"] is None
        last = chunks(server, stream_options={"include_usage": True})[-1]
        assert last["metrics"]["speculative_decoding"]["num_spec_tokens"] == 4


def test_tokens_as_token_ids_by_default() -> None:
    with served(return_tokens_as_token_ids=True) as server:
        tokens = complete(server, logprobs=0)["choices"][0]["logprobs"]["tokens"]
        assert all(one.startswith("token_id:") for one in tokens)
        tokens = complete(server, logprobs=0, return_tokens_as_token_ids=False)["choices"][0]["logprobs"]["tokens"]
        assert not any(one.startswith("token_id:") for one in tokens)


def test_fingerprints() -> None:
    with served(fingerprint_mode="custom", fingerprint_value="mine") as server:
        assert complete(server)["system_fingerprint"] == "mine"
    with served(fingerprint_mode="none") as server:
        assert complete(server)["system_fingerprint"] is None
    with pytest.raises(ValueError, match="--fingerprint-value"):
        ServerConfig(fingerprint_mode="custom")


def test_keep_alive_comments() -> None:
    config = ServerConfig(sse_keep_alive_interval=0.01)
    with stub_server(stub_engine(step_seconds=0.2), config) as server:
        response = server.post("/v1/completions", {"prompt": [7], "max_tokens": 3, "stream": True})
    assert ": keep-alive\n\n" in response.text and response.text.endswith("data: [DONE]\n\n")


def error(response: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = response.json()["error"]
    return found


def test_errors_in_the_schema_of_vllm() -> None:
    with served(error_format="vllm") as server:
        found = error(server.post("/v1/completions", {"prompt": "a", "temperature": -1}))
        assert (found["type"], found["code"], found["param"]) == ("BadRequestError", 400, "temperature")
        found = error(server.post("/v1/completions", {"prompt": "a", "model": "other"}))
        assert (found["type"], found["code"]) == ("NotFoundError", 404)
        found = error(server.post("/v1/completions", {"prompt": "a", "seed": -(1 << 63) - 1}))
        assert found["message"].endswith("(greater_than_equal)")
