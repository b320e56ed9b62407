"""`quire complete` and `quire chat --url` against real servers on the loopback interface."""

import http.server
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.config.server import ServerConfig
from quire.entrypoints.cli.api_client import ApiClient, key_from
from quire.entrypoints.cli.main import main
from tests.entrypoints.stub_server import StubServer, stub_engine, stub_server
from tests.entrypoints.test_chat import Screen


@pytest.fixture(scope="module")
def server() -> Iterator[StubServer]:
    with stub_server(stub_engine()) as one:
        yield one


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "QUIRE_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))


def expected(server: StubServer, path: str, **body: Any) -> str:
    [choice] = server.post(path, body).json()["choices"]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def test_complete_streams_the_servers_text(server: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    text = expected(server, "/v1/completions", prompt="one two", max_tokens=5)
    for words in (["one two"], ["-q", "one two"]):
        assert main(["complete", *words, "--url", f"{server.url}/v1", "--max-tokens", "5"]) == 0
        assert capsys.readouterr().out == text + "\n"
    assert main(["complete", "one two", "--url", server.url, "--max-tokens", "5"]) == 0  # /v1 is understood
    assert capsys.readouterr().out == text + "\n"


def test_complete_reads_lines_and_one_bad_line_fails_alone(
    server: StubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    too_long = "word " * 10_000
    type_lines(monkeypatch, "one", "", too_long, "one two")
    assert main(["complete", "--url", f"{server.url}/v1", "--max-tokens", "3", "--stop", "seven"]) == 1
    printed = capsys.readouterr()
    texts = [expected(server, "/v1/completions", prompt=p, max_tokens=3, stop=["seven"]) for p in ("one", "one two")]
    assert printed.out == f"{texts[0]}\n\n\n{texts[1]}\n"
    assert printed.err.count("quire: error: ") == 1 and "tokens; at most" in printed.err


def test_chat_keeps_its_history_on_a_server(
    server: StubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved = tmp_path / "saved.json"
    type_lines(monkeypatch, "Hi", "/set max_tokens 2", "Again", "/set n 2", "/show", f"/save {saved}", "/quit", "never")
    flags = ["--url", f"{server.url}/v1", "--system-prompt", "Be brief.", "--max-tokens", "4", "--temperature", "1"]
    assert main(["chat", *flags]) == 1
    printed = capsys.readouterr()
    assert printed.err == "quire: error: n is always 1 in a chat\n"
    messages = json.loads(saved.read_text())["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    for end, most in ((2, 4), (4, 2)):
        asked = {"messages": messages[:end], "max_tokens": most}
        assert messages[end]["content"] == expected(server, "/v1/chat/completions", **asked) != ""
    assert "model: stub\nsystem: Be brief.\nmessages: 4\ntemperature: 1.0\nmax_tokens: 2\n" in printed.out


def test_quick_chat_and_a_named_model(server: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    question = [{"role": "user", "content": "/Hi"}]
    text = expected(server, "/v1/chat/completions", messages=question, max_tokens=4)
    for model in (["--model-name", "stub"], ["--model", "stub"], ["stub"]):
        assert main(["chat", "--url", f"{server.url}/v1", "-q", "/Hi", "--max-tokens", "4", *model]) == 0
        assert capsys.readouterr().out == text + "\n"


@pytest.mark.parametrize("command", ["complete", "chat"])
def test_keys_come_from_the_flag_or_the_environment(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with stub_server(stub_engine(), api_keys=("right",)) as server:
        argv = [command, "-q", "one", "--url", f"{server.url}/v1", "--max-tokens", "2"]
        assert main(argv) == 2
        assert "give it with --api-key or in QUIRE_API_KEY or OPENAI_API_KEY" in capsys.readouterr().err
        assert main([*argv, "--api-key", "wrong"]) == 2
        error = capsys.readouterr().err
        assert "the API key is not known" in error and "wrong;" not in error
        assert main([*argv, "--api-key", "right"]) == 0
        monkeypatch.setenv("OPENAI_API_KEY", "right")
        assert main(argv) == 0


def test_the_order_of_keys() -> None:
    assert key_from({"OPENAI_API_KEY": "o", "QUIRE_API_KEY": " , a,b"}) == "a"
    assert key_from({"OPENAI_API_KEY": "o", "QUIRE_API_KEY": ""}) == "o" and key_from({}) is None


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["complete", "x", "-q", "y"], "both PROMPT and --quick"),
        (["complete", "x", "--url", "localhost:8000"], "it must look like http://"),
        (["complete", "x", "--url", "http://h:99999/v1"], "out of range"),
        (["complete", "x", "--url", "http://me:secret@h/v1"], "a key goes into --api-key"),
        (["complete", "x", "--api-key", "a\nb"], "the API key holds characters"),
        (["complete", "x", "--temperature", "-1"], "temperature is -1.0"),
        (["complete", "x", "--n", "2"], "n is always 1 here"),
        (["complete", "x", "--timeout", "0"], "timeout is 0"),
        (["complete", "x", "--url", "http://no-such-host.invalid/v1"], "check the host's name"),
        (["complete", "x", "--url", "http://127.0.0.1:PORT/v1"], "Connection refused; start a server with quire serve"),
        (["chat", "--url", "http://127.0.0.1:PORT/v1"], "cannot reach http://127.0.0.1:"),
        (["chat", "--url", "http://h/v1", "--block-size", "32"], "--block-size with --url"),
        (["chat", "--api-key", "k"], "--api-key is for a server; give its address with --url"),
        (["complete", "x", "--url", "SERVER/v1", "--model-name", "no"], "(--model-name)"),
        (["complete", "x", "--url", "SERVER/v2"], "does --url end in /v1?"),
        (["complete", "x", "--url", "https://SERVER/v1"], "rather than https://"),
    ],
)
def test_mistakes_are_explained(
    argv: list[str], message: str, server: StubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    def filled(word: str) -> str:
        address = server.url.removeprefix("http://") if word.startswith("https") else server.url
        return word.replace("SERVER", address).replace("PORT", str(free_port()))

    assert main([filled(word) for word in argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("quire: error: ") and message in error and error.count("\n") == 1
    assert "secret" not in error


class Handler(http.server.BaseHTTPRequestHandler):
    """Responds to every POST with the server's `script`: status, content type, body."""

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.server.asked.append(json.loads(self.rfile.read(length)))  # type: ignore[attr-defined]
        status, kind, body = self.server.script  # type: ignore[attr-defined]
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def scripted(status: int, kind: str, body: bytes) -> Iterator[tuple[str, list[Any]]]:
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as made:
        made.script, made.asked = (status, kind, body), []  # type: ignore[attr-defined]
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{made.server_port}/v1", made.asked  # type: ignore[attr-defined]
        finally:
            made.shutdown()
            thread.join(10)


EVENTS = (
    b'data: {"choices":[{"text":"\xc3\xa9"}]}\r\n\r\n'
    b": ping\n\n"
    b'data: {"choices":\ndata: [{"text":"!","finish_reason":"stop"}]}\n\n'
)


@pytest.mark.parametrize("end", [b"", b"data: [DONE]\n\n", b'data: {"choices":[]}\n\ndata:[DONE]'])
def test_streams_of_other_servers(end: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with scripted(200, "text/event-stream; charset=utf-8", EVENTS + end) as (url, asked):
        assert main(["complete", "x", "--url", url, "--model-name", "m", "--temperature", "1", "--seed", "3"]) == 0
    assert capsys.readouterr().out == "é!\n"
    assert asked == [{"model": "m", "prompt": "x", "stream": True, "temperature": 1.0, "seed": 3}]  # nothing else


def test_a_server_that_does_not_stream(capsys: pytest.CaptureFixture[str]) -> None:
    body = b'{"choices":[{"message":{"content":"whole"},"finish_reason":"stop"}],"usage":{"completion_tokens":1}}'
    with scripted(200, "application/json", body) as (url, asked):
        assert main(["chat", "-q", "x", "--url", url, "--model-name", "m", "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out == "whole\n"
    assert asked[0]["max_completion_tokens"] == 3 and "temperature" not in asked[0]


@pytest.mark.parametrize(
    ("status", "kind", "body", "message"),
    [
        (200, "text/html", b"<html>\nx", "does not respond as an OpenAI-compatible server: 200 '<html>'"),
        (502, "text/html", b"", "502 and an empty body; does --url end in /v1?"),
        (200, "text/event-stream", b'data: {"choices":[{"text":"a"}]}\n\n', "ended the stream early"),
        (200, "text/event-stream", b'data: {"error":{"message":"no room"}}\n\n', "no room"),
        (200, "text/event-stream", b"data: oops\n\n", "does not respond as an OpenAI-compatible server"),
        (400, "application/json", b'{"object":"error","message":"old shape"}', "old shape"),
        (404, "application/json", b'{"detail":"Not Found"}', "Not Found; does --url end in /v1?"),
        (429, "application/json", b'{"error":{"message":"slow down"}}', "slow down; try again later"),
    ],
)
def test_invalid_responses(
    status: int, kind: str, body: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted(status, kind, body) as (url, _):
        assert main(["complete", "x", "--url", url, "--model-name", "m"]) == 2
    assert message in capsys.readouterr().err


def test_a_silent_server(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        assert main(["complete", "x", "--url", url, "--timeout", "0.1"]) == 2
    assert "sent nothing for 0.1 seconds (--timeout)" in capsys.readouterr().err


def test_closing_ends_what_other_threads_wait_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = ApiClient(f"http://127.0.0.1:{listening.getsockname()[1]}")
        errors: list[str] = []

        def ask() -> None:
            try:
                client.model_names()
            except ValueError as error:
                errors.append(str(error))

        thread = threading.Thread(target=ask)
        thread.start()
        connection, _ = listening.accept()
        connection.recv(1)  # it has sent its request
        client.close()
        thread.join(10)
        connection.close()
    assert len(errors) == 1


@pytest.mark.parametrize(("command", "code"), [("complete", 130), ("chat", 0)])
def test_ctrl_c_aborts_the_request_on_the_server(command: str, code: int) -> None:
    with stub_server(stub_engine(step_seconds=0.01), ServerConfig()) as server:
        child = subprocess.Popen(
            [sys.executable, "-m", "quire", command, "-q", "one", "--url", f"{server.url}/v1", "--max-tokens", "5000"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert child.stdout is not None
        assert os.read(child.stdout.fileno(), 1)  # it streams
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=20)
        assert child.returncode == code and err == b""
        server.wait_until(lambda: len(server.engine.aborted) == 1 and not server.engine.running)


def test_complete_in_a_terminal() -> None:
    with stub_server(stub_engine(step_seconds=0.01)) as server:
        screen = Screen("-m", "quire", "complete", "--url", server.url, "--max-tokens", "5000", NO_COLOR="1")
        screen.wait_for("Ctrl-C stops an answer")
        screen.wait_for(">>> ")
        screen.type("one two\n")
        screen.wait_for("nine ten")
        screen.type("\x03")
        screen.wait_for("interrupted")
        screen.wait_for(">>> ")
        server.wait_until(lambda: not server.engine.running)
        screen.type("\x04")
        assert screen.exit_code() == 0


@pytest.mark.parametrize("command", ["complete", "run-batch", "collect-env"])
def test_help_imports_no_engine(command: str) -> None:
    code = (
        "import sys\n"
        "from quire.entrypoints.cli.main import main\n"
        "try:\n"
        f"    main([{command!r}, '--help'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "print(sorted({'torch', 'numpy', 'tokenizers', 'starlette', 'tqdm', 'zmq'} & set(sys.modules)))\n"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.stdout.splitlines()[-1] == "[]"
