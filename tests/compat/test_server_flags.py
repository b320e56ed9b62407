"""Flags of the server: what each of them changes, in a server started with it."""

import logging
import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.config import EngineConfig
from quire.config.flags import engine_kwargs
from quire.config.server import ServerConfig, server_config
from quire.entrypoints.cli import serve
from quire.entrypoints.http.context import Job
from quire.entrypoints.http.server import bind
from tests.entrypoints.server_process import server_process
from tests.entrypoints.stub_server import MODEL, StubServer, stub_engine, stub_server

BODY: dict[str, Any] = {"model": MODEL, "prompt": "one two", "max_tokens": 3}


def flags(*words: str) -> ServerConfig:
    return server_config(serve.parser().parse(list(words)))


def logged(caplog: pytest.LogCaptureFixture, level: int, *words: str, **fields: Any) -> list[str]:
    """Lines about one completion."""
    with caplog.at_level(level, logger="quire"), stub_server(stub_engine(), flags(*words)) as server:
        assert server.post("/v1/completions", BODY | fields).status_code == 200
        server.wait_until(lambda: server.server.context.http_metrics.in_progress == 0)
    return [record.getMessage() for record in caplog.records if record.name == "quire.requests"]


def test_a_server_of_tokens_alone(tmp_path: Path) -> None:
    with server_process(tmp_path, "--tokens-only") as server:
        request = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2}}
        (choice,) = server.post("/inference/v1/generate", request).json()["choices"]
        assert len(choice["token_ids"]) == 2
        assert server.get("/v1/models").status_code == 200
        for path in ("/v1/completions", "/tokenize", "/v1/chat/completions/render"):
            assert server.post(path, BODY).status_code == 404
        text = server.post("/inference/v1/generate", request | {"output_mode": "text"})  # there is no tokenizer
        assert text.status_code == 400 and "try: curl" not in server.log.read_text()


def test_requests_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert not logged(caplog, logging.DEBUG)
    (line,) = logged(caplog, logging.INFO, "--enable-log-requests")
    assert line.startswith("received request cmpl-") and "max_tokens=3" in line and "one two" not in line
    caplog.clear()
    _, prompt = logged(caplog, logging.DEBUG, "--enable-log-requests", "--max-log-len", "3")
    assert "'one'" in prompt and "one two" not in prompt


def test_responses_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    words = ("--enable-log-requests", "--enable-log-outputs")
    _, line = logged(caplog, logging.INFO, *words)
    assert line.startswith("response to request cmpl-") and line.endswith("finish reason length")
    caplog.clear()
    _, cut = logged(caplog, logging.INFO, *words, "--max-log-len", "2")
    assert len(cut) < len(line)
    with pytest.raises(ValueError, match="--enable-log-outputs needs --enable-log-requests"):
        flags("--enable-log-outputs")


def test_parts_of_streams_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    words = ("--enable-log-requests", "--enable-log-outputs")
    lines = logged(caplog, logging.INFO, *words, stream=True)
    assert any(line.startswith("delta of request") for line in lines)
    assert lines[-1].startswith("response to request") and lines[-1].endswith("finish reason length")
    caplog.clear()
    lines = logged(caplog, logging.INFO, *words, "--no-enable-log-deltas", stream=True)
    assert len(lines) == 2 and lines[1].startswith("response to request")


def test_the_parts_of_every_choice_are_joined(caplog: pytest.LogCaptureFixture) -> None:
    words = ("--enable-log-requests", "--enable-log-outputs", "--no-enable-log-deltas")
    fields: dict[str, Any] = {"prompt": [[7], [7, 8]], "n": 2, "request_id": "x"}
    whole = sorted(logged(caplog, logging.DEBUG, *words, **fields))
    caplog.clear()
    streamed = sorted(logged(caplog, logging.DEBUG, *words, **fields, stream=True))
    assert sum("finish reason length" in line for line in streamed) == 4
    assert [line for line in streamed if "received" not in line] == [line for line in whole if "received" not in line]


def test_stacks_of_errors_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    for words, stack in (((), False), (("--log-error-stack",), True)):
        with stub_server(stub_engine(), flags(*words)) as server:
            assert server.post("/v1/completions", {"prompt": "a", "max_tokens": -1}).status_code == 400
        assert any(record.exc_info for record in caplog.records) is stack


def access_lines(caplog: pytest.LogCaptureFixture, *words: str) -> int:
    with caplog.at_level(logging.INFO, logger="quire"), stub_server(stub_engine(), flags(*words)) as server:
        server.get("/version")
        server.wait_until(lambda: server.server.context.http_metrics.in_progress == 0)
    return sum(record.name == "quire.access" for record in caplog.records)


def test_the_access_log_can_be_off(caplog: pytest.LogCaptureFixture) -> None:
    assert access_lines(caplog, "--disable-uvicorn-access-log") == 0
    assert access_lines(caplog, "--no-disable-uvicorn-access-log") == 1


def test_the_level_of_the_http_server(caplog: pytest.LogCaptureFixture) -> None:
    access = logging.getLogger("quire.access")
    try:
        assert access_lines(caplog, "--uvicorn-log-level", "warning") == 0
        assert logging.getLogger("uvicorn.error").level == logging.WARNING
        assert access_lines(caplog, "--uvicorn-log-level", "info") == 1
        assert logging.getLogger("uvicorn.error").level == logging.INFO
    finally:
        access.setLevel(logging.NOTSET)


def test_a_unix_domain_socket(tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    with stub_server(stub_engine(), flags("--uds", str(path))) as server:
        assert server.url == f"unix:{path}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            assert client.get("http://quire/version").status_code == 200
            assert client.post("http://quire/v1/completions", json=BODY).json()["usage"]["completion_tokens"] == 3
        with pytest.raises(ValueError, match=r"is in use; .*\(--uds\)"):
            bind(flags("--uds", str(path)))
    bind(flags("--uds", str(path))).close()  # what an ended server has left does not matter
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot listen on .*file: .*\(--uds\)"):
        bind(flags("--uds", str(tmp_path / "file")))


def test_the_schema_can_be_left_out() -> None:
    for words, status in (((), 200), (("--disable-fastapi-docs",), 404)):
        with stub_server(stub_engine(), flags(*words)) as server:
            assert server.get("/openapi.json").status_code == status


def test_threads_that_render_prompts() -> None:
    with stub_server(stub_engine(), flags("--renderer-num-workers", "3")) as server:
        assert server.server.context._threads._max_workers == 3


def test_any_name_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, status in (("0", 404), ("1", 200)):
        monkeypatch.setenv("VLLM_SKIP_MODEL_NAME_VALIDATION", value)
        with stub_server(stub_engine(), flags()) as server:
            assert server.post("/v1/completions", BODY | {"model": "other"}).status_code == status


def test_the_queue_is_limited() -> None:
    given = engine_kwargs(serve.parser().parse(["--max-num-queued-reqs", "3"]))
    engine = stub_engine(step_seconds=0.02)
    engine.config.scheduler.max_num_queued_reqs = EngineConfig.from_kwargs(**given).scheduler.max_num_queued_reqs
    with stub_server(engine) as server:
        assert server.post("/v1/completions", BODY | {"prompt": ["a"] * 3}).status_code == 200
        assert server.post("/v1/completions", BODY | {"prompt": ["a"] * 4}).status_code == 400
        with server.client().completions.create(model=MODEL, prompt="a", max_tokens=4000, stream=True) as stream:
            next(iter(stream))
            assert server.post("/v1/completions", BODY | {"n": 2}).status_code == 200
            refused = server.post("/v1/completions", BODY | {"n": 3})
            assert refused.status_code == 503 and "1 requests are in progress" in refused.text


def test_waiting_tokens_are_limited() -> None:
    engine = stub_engine()
    engine.config.scheduler.max_num_queued_tokens = 8
    with stub_server(engine) as server:
        other = server.server.context.jobs["other"] = Job("other", 1, queued_tokens=7)
        refused = server.post("/v1/completions", BODY)
        assert refused.status_code == 503 and "prompts of 7 tokens are waiting" in refused.text
        other.queued_tokens = 0
        assert server.post("/v1/completions", BODY | {"prompt": list(range(20))}).status_code == 200
        assert not any(job.queued_tokens for job in server.server.context.jobs.values())
        del server.server.context.jobs["other"]


# TLS


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """Of two servers and of one client, signed by themselves."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with")
    for name in ("first", "second", "client"):
        subprocess.run(
            f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {name}.key -out {name}.pem -days 1 -subj /CN={name} "
            "-addext subjectAltName=IP:127.0.0.1",
            shell=True,
            cwd=tmp_path,
            capture_output=True,
            check=True,
        )
    return tmp_path


def tls(folder: Path, *words: str) -> ServerConfig:
    return flags("--ssl-keyfile", str(folder / "first.key"), "--ssl-certfile", str(folder / "first.pem"), *words)


def trusting(folder: Path, *names: str) -> ssl.SSLContext:
    context = ssl.create_default_context()
    for name in names:
        context.load_verify_locations(folder / f"{name}.pem")
    return context


def test_clients_need_certificates(certificates: Path) -> None:
    words = ("--ssl-ca-certs", str(certificates / "client.pem"), "--ssl-cert-reqs", "2")
    with stub_server(stub_engine(), tls(certificates, *words)) as server:
        context = trusting(certificates, "first")
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{server.url}/version", verify=context)
        context.load_cert_chain(certificates / "client.pem", certificates / "client.key")
        assert httpx.get(f"{server.url}/version", verify=context).status_code == 200


def test_ciphers(certificates: Path) -> None:
    only = "ECDHE-RSA-AES256-GCM-SHA384"
    with stub_server(stub_engine(), tls(certificates, "--ssl-ciphers", only)) as server:
        context = trusting(certificates, "first")
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        assert cipher(server, context) == only
        context.set_ciphers("ECDHE-RSA-AES128-GCM-SHA256")
        with pytest.raises(ssl.SSLError):
            cipher(server, context)


def cipher(server: StubServer, context: ssl.SSLContext) -> str:
    url = httpx.URL(server.url)
    connected = socket.create_connection((url.host, url.port or 0), 20)
    with connected as sock, context.wrap_socket(sock, server_hostname=url.host) as secure:
        found = secure.cipher()
        assert found is not None
        return found[0]


@pytest.mark.parametrize("refreshes", [True, False])
def test_a_new_certificate_is_used_without_a_restart(certificates: Path, refreshes: bool) -> None:
    with stub_server(stub_engine(), tls(certificates, *(["--enable-ssl-refresh"] * refreshes))) as server:
        assert httpx.get(f"{server.url}/version", verify=trusting(certificates, "first")).status_code == 200
        old = trusting(certificates, "first")
        for kind in ("key", "pem"):
            (certificates / f"second.{kind}").replace(certificates / f"first.{kind}")
        if refreshes:
            assert server.server._certificate is not None
            server.in_loop(server.server._certificate.refresh)
            new = trusting(certificates, "first")
            assert httpx.get(f"{server.url}/version", verify=new).status_code == 200
        else:
            assert server.server._certificate is None
            assert httpx.get(f"{server.url}/version", verify=old).status_code == 200
