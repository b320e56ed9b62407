"""Errors have OpenAI's schema, the right status and the field."""

import json
import logging
import socket
from typing import Any

import httpx
import openai
import pytest

from quire.config.server import ServerConfig
from tests.entrypoints.stub_server import MODEL, StubServer, stub_engine, stub_server

JSON = {"Content-Type": "application/json"}


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": [1] * 100_000}, "prompt"),
        ({"prompt": "a", "max_tokens": "many"}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "temperature": True}, "temperature"),
        ({"prompt": "a", "top_p": 2}, "top_p"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 10_000}, "n"),
        ({"prompt": "a", "logprobs": 10_000}, "logprobs"),
        ({"prompt": "a", "logprobs": -5}, "logprobs"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "stop": ["x"] * 65}, "stop"),
        ({"prompt": "a", "stop_token_ids": [10**9]}, "stop_token_ids"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"5": 1000}}, "logit_bias"),
        ({"prompt": "a", "seed": 2**70}, "seed"),
        ({"prompt": "a", "priority": 2**70}, "priority"),
        ({"prompt": "a", "suffix": "z"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"prompt": "a", "watermarking": True}, "watermarking"),
        ({"prompt": "a", "routed_experts_prompt_start": 1}, "routed_experts_prompt_start"),
        ({"prompt": "a", "return_mm_kwargs": True}, "return_mm_kwargs"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "stream": "maybe"}, "stream"),
        ({"prompt": "a", "request_id": "a b\n"}, "request_id"),
        ({"prompt": "a", "repetition_detection": {"x": 1}}, "repetition_detection"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_value_names_its_field(server: StubServer, body: dict[str, Any], param: str, stream: bool) -> None:
    if stream and "stream_options" not in body:
        body = {"stream": True, **body}
    response = server.post("/v1/completions", {"model": MODEL, **body})
    error = error_of(response)
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error


def test_a_prompt_that_is_too_long_has_its_own_code(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model=MODEL, prompt=[1] * 100_000)
    assert error.value.code == "context_length_exceeded"


def test_one_bad_prompt_of_several_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"prompt\[1\]"):
        client.completions.create(model=MODEL, prompt=[[1], [10**9]], stream=True)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b'"x"', b"\xff\xfe", b'{"metadata": ' + b"[" * 60_000])
def test_invalid_json_bodies(server: StubServer, body: bytes) -> None:
    response = httpx.post(f"{server.url}/v1/completions", content=body, headers=JSON)
    assert response.status_code == 400 and error_of(response)["code"] == "invalid_json"


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/json"])
def test_a_body_that_is_not_declared_as_json_is_refused_unread(server: StubServer, content_type: str | None) -> None:
    with socket.create_connection((httpx.URL(server.url).host, httpx.URL(server.url).port or 0), 20) as client:
        declared = f"Content-Type: {content_type}\r\n" if content_type else ""
        client.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{declared}Content-Length: 100\r\n\r\n".encode())
        answer = client.makefile("rb").read().decode()
    assert answer.startswith("HTTP/1.1 415 ") and "it must be application/json" in answer


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON", "application/x+json"])
def test_spellings_of_the_content_type(server: StubServer, content_type: str) -> None:
    headers = {"Content-Type": content_type}
    body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 1}).encode()
    assert httpx.post(f"{server.url}/v1/completions", content=body, headers=headers).status_code == 200


def test_a_lone_surrogate_in_json_is_refused(server: StubServer) -> None:
    response = httpx.post(f"{server.url}/v1/completions", content=b'{"prompt": "\\ud800"}', headers=JSON)
    assert response.status_code == 400 and error_of(response)["message"]


def test_paths_methods_and_models(server: StubServer) -> None:
    assert error_of(server.get("/nowhere"))["code"] == "not_found"
    wrong = server.get("/v1/completions")
    assert wrong.status_code == 405 and wrong.headers["allow"] == "POST" and error_of(wrong)
    missing = server.post("/v1/completions", {"model": "other", "prompt": "a"})
    assert missing.status_code == 404 and error_of(missing)["param"] == "model"
    assert server.get("/v1/models/other").status_code == 404


def test_unknown_fields_warn_once(server: StubServer, caplog: pytest.LogCaptureFixture) -> None:
    body = {"model": MODEL, "prompt": "a", "temprature": 1, "max_tokens": 1}
    with caplog.at_level(logging.WARNING, logger="quire"):
        assert [server.post("/v1/completions", body).status_code for _ in range(2)] == [200, 200]
    assert [record.getMessage().count("'temperature'") for record in caplog.records] == [1]


def test_strict_fields() -> None:
    with stub_server(stub_engine(), ServerConfig(strict_fields=True)) as strict:
        response = strict.post("/v1/completions", {"model": MODEL, "prompt": "a", "temprature": 1})
        assert response.status_code == 400 and error_of(response)["param"] == "temprature"


def test_large_bodies() -> None:
    with stub_server(stub_engine(), ServerConfig(max_request_bytes=1000)) as server:
        assert error_of(server.post("/v1/completions", {"prompt": "a" * 2000}))["code"] == "request_too_large"

        def pieces() -> Any:  # no Content-Length
            yield b'{"prompt": "'
            for _ in range(20):
                yield b"a" * 100

        response = httpx.post(f"{server.url}/v1/completions", content=pieces(), headers=JSON)
        assert response.status_code == 413 and error_of(response)
        assert server.post("/v1/completions", {"prompt": "a"}).status_code == 200


def test_half_a_body_and_a_dropped_connection(server: StubServer) -> None:
    host, port = httpx.URL(server.url).host, httpx.URL(server.url).port
    assert port is not None
    with socket.create_connection((host, port)) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
        server.wait_until(lambda: server.server.context.http_metrics.in_progress == 1)
    server.wait_until(lambda: server.server.context.http_metrics.in_progress == 0)


def test_an_internal_error_is_not_exposed(server: StubServer, caplog: pytest.LogCaptureFixture) -> None:
    engine = server.engine
    before, engine.output_processor.add = engine.output_processor.add, None  # type: ignore[method-assign, assignment]
    try:
        response = server.post("/v1/completions", {"prompt": "a"}, headers={"X-Request-Id": "mine"})
    finally:
        engine.output_processor.add = before  # type: ignore[method-assign]
    error = error_of(response)
    assert response.status_code == 500 and "mine" in error["message"] and "NoneType" not in response.text
    assert "NoneType" in caplog.text


def test_the_waiting_queue_has_a_limit() -> None:
    engine = stub_engine(0.01)
    engine.max_num_seqs = 1
    body = {"model": MODEL, "prompt": [1], "max_tokens": 1}
    with stub_server(engine, ServerConfig(max_waiting_requests=0)) as server:
        assert server.post("/v1/completions", body).status_code == 200
        with server.client().completions.create(model=MODEL, prompt=[1], max_tokens=1000, stream=True):
            response = server.post("/v1/completions", body)
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
        assert error_of(response)["code"] == "overloaded"


def test_json_of_errors_is_compact_and_utf8(server: StubServer) -> None:
    response = server.post("/v1/completions", {"model": "größe", "prompt": "a"})
    assert response.headers["content-type"] == "application/json"
    assert "größe" in json.loads(response.content)["error"]["message"]


def test_error_messages_are_truncated(server: StubServer) -> None:
    response = server.post("/v1/completions", {"prompt": "a", "model": "m" * 20_000})
    assert response.status_code == 404 and len(error_of(response)["message"]) < 2100
