"""A dialect of another API's shape, on a real server: served, limited and authenticated as OpenAI's is."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from quire.config.server import ServerConfig
from quire.entrypoints.http import dialect
from tests.entrypoints.http import generate_dialect
from tests.entrypoints.server_process import server_process
from tests.entrypoints.stub_server import StubServer, stub_engine, stub_server

KEY = {"Authorization": "Bearer key"}


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialect, "_registered", {})
    generate_dialect.register()


@pytest.fixture
def server(registered: None) -> Iterator[StubServer]:
    with stub_server(stub_engine(), ServerConfig(), api_keys=("key",)) as server:
        yield server


def ask(server: StubServer, inputs: object, stream: bool = False, **parameters: object) -> httpx.Response:
    body = {"inputs": inputs, "parameters": parameters, "stream": stream}
    return server.post("/generate", body, headers=KEY)


def test_a_whole_text_and_a_stream_are_the_same(server: StubServer) -> None:
    whole = ask(server, "count", max_new_tokens=5)
    assert whole.status_code == 200 and whole.json()["finish_reason"] == "length"
    streamed = ask(server, "count", stream=True, max_new_tokens=5)
    assert streamed.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in streamed.text.splitlines()]
    assert "".join(line["generated_text"] for line in lines) == whole.json()["generated_text"] != ""
    assert [line["finish_reason"] for line in lines[:-1]] == [None] * (len(lines) - 1)
    assert lines[-1]["finish_reason"] == "length"


def test_a_stop_string(server: StubServer) -> None:
    text = ask(server, "count", max_new_tokens=12).json()["generated_text"]
    stop = text.split()[3]
    found = ask(server, "count", max_new_tokens=12, stop=[stop]).json()
    assert found == {"generated_text": text[: text.index(stop)], "finish_reason": "stop"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("inputs", "parameters", "message"),
    [
        ("count", {"temperature": -1.0}, "parameters: temperature is -1"),
        ("count", {"max_new_tokens": 0}, "max_tokens"),
        ("count", {"top_q": 1.0}, "top_q"),
        (3, {}, "inputs: expected str"),
        ("count " * 20_000, {}, "inputs"),
        ("", {}, "inputs: "),
    ],
)
def test_mistakes_are_explained_in_its_own_shape(
    server: StubServer, stream: bool, inputs: object, parameters: dict[str, object], message: str
) -> None:
    response = ask(server, inputs, stream, **parameters)
    assert response.status_code == 400 and response.json().keys() == {"error", "error_type"}
    assert message in response.json()["error"]


def test_a_key_is_needed(server: StubServer) -> None:
    for headers in ({}, {"Authorization": "Bearer another"}):
        response = server.post("/generate", {"inputs": "count"}, headers=headers)
        assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error_type"] == "invalid_api_key" and "key" in response.json()["error"]


def test_other_methods_and_paths(server: StubServer) -> None:
    assert server.get("/generate", headers=KEY).json()["error_type"] == "method_not_allowed"
    assert server.post("/generate/more", {}, headers=KEY).json()["error_type"] == "not_found"
    assert isinstance(server.post("/generated", {}, headers=KEY).json()["error"], dict)  # OpenAI's
    assert server.post("/v1/completions", {"prompt": "count"}, headers=KEY).status_code == 200


def test_a_deadline_ends_a_stream_with_an_error(registered: None) -> None:
    with stub_server(stub_engine(0.01), ServerConfig(request_timeout=0.2)) as server:
        lines = ask(server, "count", stream=True, max_new_tokens=5000).text.splitlines()
        assert "generated_text" in json.loads(lines[0]) and json.loads(lines[-1])["error_type"] == "timeout"
        assert ask(server, "count", max_new_tokens=5000).status_code == 504
        server.wait_until(lambda: not server.engine.running and not server.server.context.jobs)


def test_a_disconnect_aborts_the_request(registered: None) -> None:
    with stub_server(stub_engine(0.01)) as server:
        body = {"inputs": "count", "parameters": {"max_new_tokens": 5000}, "stream": True}
        with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=20) as response:
            next(response.iter_lines())
        server.wait_until(lambda: not server.engine.running and not server.server.context.jobs)
        assert len(server.engine.aborted) == 1


def test_as_an_installed_plugin_with_the_real_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "site" / "generate_dialect-1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: generate-dialect\nVersion: 1.0\n")
    point = f"[quire.general_plugins]\ngenerate = {generate_dialect.__name__}:register\n"
    (installed / "entry_points.txt").write_text(point)
    root = Path(__file__).parents[3]
    monkeypatch.setenv("PYTHONPATH", f"{installed.parent}:{root}")
    run = tmp_path / "run"
    run.mkdir()
    with server_process(run, "--num-gpu-blocks-override", "256", "--api-key", "key") as server:
        body = {"inputs": "Once", "parameters": {"max_new_tokens": 4, "temperature": 0.0}}
        assert server.post("/generate", body).json()["error_type"] == "invalid_api_key"
        whole = server.post("/generate", body, headers=KEY).json()
        wanted = {"prompt": "Once", "max_tokens": 4, "temperature": 0}
        (choice,) = server.post("/v1/completions", wanted, headers=KEY).json()["choices"]
        assert whole == {"generated_text": choice["text"], "finish_reason": choice["finish_reason"]}
        lines = server.post("/generate", body | {"stream": True}, headers=KEY).text.splitlines()
        assert "".join(json.loads(line)["generated_text"] for line in lines) == choice["text"]
