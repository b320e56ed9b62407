"""`quire run-batch`: with its own engine, against a server, and with invalid lines."""

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.config.server import ServerConfig
from quire.entrypoints.cli import batch_runner, run_batch
from quire.entrypoints.cli.batch_input import BadLine, check_file, parse_line, read_requests
from quire.entrypoints.cli.batch_output import BatchOutput
from quire.entrypoints.cli.main import main
from tests.entrypoints.server_process import server_process
from tests.entrypoints.stub_server import StubServer, stub_engine, stub_server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GREEDY = {"temperature": 0, "max_tokens": 6}


def request(custom_id: Any, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write(tmp_path: Path, *lines: Any) -> Path:
    file = tmp_path / "in.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def alike(one: Any, other: Any) -> bool:
    """The same response: ids and times differ, and logprobs in their last digits, depending on the batch."""
    if isinstance(one, dict) and isinstance(other, dict):
        names = one.keys() - {"id", "created"}
        return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in names)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, abs_tol=1e-3)
    return bool(one == other)


@pytest.fixture(scope="module")
def server() -> Iterator[StubServer]:
    with stub_server(stub_engine()) as one:
        yield one


GOOD = [
    request("chat", CHAT, messages=[{"role": "user", "content": "What is the capital of France?"}], **GREEDY),
    request("text", prompt="The capital of Italy is", logprobs=2, echo=True, **GREEDY),
    request("ids", prompt=[[504, 3575], [1, 2, 3]], return_token_ids=True, **GREEDY),
    request("many", model="tiny", prompt="Once upon a time", n=2, seed=5, max_tokens=4),
    request("unknown model", model="other", prompt="x"),
    request("bad value", prompt="x", temperature=-1),
]
BAD = [
    "{oops",
    request("embedding", "/v1/embeddings", input="x"),
    request("stream", prompt="x", stream=True),
]


def test_results_equal_the_servers(tmp_path: Path) -> None:
    source = write(tmp_path, *GOOD[:3], "", *BAD, *GOOD[3:])
    engine = ["--max-model-len", "256", "--num-gpu-blocks-override", "128", "--dtype", "float32"]
    engine += ["--quantization", "dequantized"]  # exact: the expected response is a near tie
    engine.append("--no-enable-prefix-caching")  # usage reports cached tokens
    files = ["-i", str(source), "-o", str(tmp_path / "out.jsonl"), "--served-model-name", "tiny"]
    child = subprocess.run(
        [sys.executable, "-m", "quire", "run-batch", *files, *engine], capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 1, child.stderr
    summary = child.stderr.splitlines()[-1]
    assert summary.startswith("quire: 9 requests in ") and "5 failed (first: line 5: not valid JSON" in summary
    results = read(tmp_path / "out.jsonl")
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.jsonl"]

    folder = tmp_path / "server"
    folder.mkdir()
    with server_process(folder, "--served-model-name", "tiny", *engine[2:]) as one:
        url = one.url
        remote = subprocess.run(
            [sys.executable, "-m", "quire", "run-batch", *files[:2], "-o", str(tmp_path / "out2.jsonl"), "--url", url],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert remote.returncode == 1, remote.stderr
        served = {line["custom_id"]: httpx.post(url + line["url"], json=line["body"], timeout=60) for line in GOOD}

    for found in (results, read(tmp_path / "out2.jsonl")):
        order = ["chat", "text", "ids", None, "embedding", "stream", "many", "unknown model", "bad value"]
        assert [line["custom_id"] for line in found] == order
        assert len({line["id"] for line in found}) == len(found)
        by_id = {line["custom_id"]: line for line in found}
        for name, expected in served.items():
            response = by_id[name]["response"]
            assert response["status_code"] == expected.status_code and by_id[name]["error"] is None
            assert alike(response["body"], expected.json()), (response["body"], expected.json())
            assert response["request_id"] == by_id[name]["id"]
        assert by_id[None]["error"]["message"].startswith("line 5: not valid JSON")
        assert by_id["embedding"]["error"]["message"].startswith("line 6: url is '/v1/embeddings'; allowed: ")
        assert by_id["stream"]["error"]["message"] == "line 7: a batch cannot stream; leave stream out"
        assert by_id["stream"]["response"] is None
    assert results[0]["response"]["body"]["choices"][0]["message"]["content"] == "The capital of France is Paris"
    assert served["unknown model"].status_code == 404 and served["bad value"].status_code == 400


def test_metrics_while_a_batch_runs(tmp_path: Path) -> None:
    source = write(tmp_path, *(request(str(i), prompt="Once", max_tokens=120, ignore_eos=True) for i in range(4)))
    engine = ["--max-model-len", "256", "--num-gpu-blocks-override", "128", "--max-num-seqs", "4"]
    files = ["-i", str(source), "-o", str(tmp_path / "out.jsonl")]
    command = [sys.executable, "-m", "quire", "run-batch", *files, *engine, "--enable-metrics", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        lines = iter(child.stderr.readline, "")
        url = next(line for line in lines if "metrics at http://127.0.0.1:" in line).split()[-1]
        text = ""
        while re.search(r"num_requests_running\{[^}]*\} [1-9]", text) is None:
            assert child.poll() is None
            with contextlib.suppress(httpx.ConnectError):  # it listens in a moment
                text = httpx.get(url, timeout=60).text
        assert httpx.get(url.replace("/metrics", "/v1/models"), timeout=60).status_code == 404
        child.stderr.read()
    assert child.returncode == 0 and len(read(tmp_path / "out.jsonl")) == 4
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_many_requests_come_back_in_order(server: StubServer, tmp_path: Path) -> None:
    """Long responses first, few at a time: completion order differs from output order."""
    lengths = [40, 30, 1, 20, 2] * 20
    source = write(tmp_path, *(request(f"r{i}", prompt="one", max_tokens=n) for i, n in enumerate(lengths)))
    out = tmp_path / "out.jsonl"
    argv = ["run-batch", "-i", str(source), "-o", str(out), "--url", f"{server.url}/v1", "--max-concurrency", "8"]
    assert main(argv) == 0
    results = read(out)
    assert [line["custom_id"] for line in results] == [f"r{i}" for i in range(len(lengths))]
    assert [line["response"]["body"]["usage"]["completion_tokens"] for line in results] == lengths
    assert os.listdir(tmp_path) in (["in.jsonl", "out.jsonl"], ["out.jsonl", "in.jsonl"])


def test_requests_to_a_busy_server_are_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runner, "MAX_BACKOFF", 0.02)
    source = write(tmp_path, *(request(f"r{i}", prompt="one", max_tokens=2) for i in range(12)))
    engine = stub_engine(0.005)
    engine.max_num_seqs = 1  # and none may wait, so most requests are sent several times
    with stub_server(engine, ServerConfig(max_waiting_requests=0)) as server:
        argv = ["run-batch", "-i", str(source), "-o", str(tmp_path / "out"), "--url", server.url]
        monkeypatch.setattr(batch_runner, "ATTEMPTS", 1000)
        assert main(argv) == 0
    assert [line["response"]["status_code"] for line in read(tmp_path / "out")] == [200] * 12


def test_mistakes_are_found_before_anything_runs(
    server: StubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = write(tmp_path, request("a", prompt="x"))
    twice = tmp_path / "twice"
    twice.write_text("\n\n".join(json.dumps(request(name, prompt="x")) for name in ("a", "b", "a")))
    out = str(tmp_path / "out")

    def refuse(*args: Any) -> None:
        raise AssertionError("it ran")

    monkeypatch.setattr(run_batch, "_run_batch", refuse)
    url = ["--url", f"{server.url}/v1"]
    for argv, message in (
        (["-i", str(twice), "-o", out, *url], "twice line 5: custom_id 'a' repeats that of line 1"),
        (["-i", "no-such-file", "-o", out, *url], "no-such-file is not a file (--input-file)"),
        (["-i", str(good), "-o", str(good), *url], "the output would replace the input"),
        (["-i", str(good), "-o", str(tmp_path), *url], "is not a regular file"),
        (["-i", str(good), "-o", "/no/such/folder/out", *url], "/no/such/folder/out"),
        (["-i", str(good), "-o", out, *url, "--block-size", "16"], "--block-size with --url"),
        (["-i", str(good), "-o", out, *url, "--max-n", "3"], "--max-n with --url"),
        (["-i", str(good), "-o", out, *url, "--enable-metrics"], "--enable-metrics with --url"),
        (["-i", str(good), "-o", out, *url, "--max-concurrency", "0"], "max_concurrency is 0"),
        (["-i", str(good), "-o", out, "--url", "http://127.0.0.1:1"], "cannot reach http://127.0.0.1:1/v1"),
        (["-i", str(good), "-o", out, "--api-key", "k"], "--api-key is for a server"),
    ):
        assert main(["run-batch", *argv]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "twice"]


WRONG_LINES = {
    "missing required field custom_id": '{"url": "/v1/completions", "body": {}}',
    "missing required field body": '{"custom_id": "x", "url": "/v1/completions"}',
    "Expected str, got int - at $.custom_id": '{"custom_id": 5, "url": "/v1/completions", "body": {}}',
    "custom_id must have 1 to 512 characters": '{"custom_id": "", "url": "/v1/completions", "body": {}}',
    "Expected object, got array": '{"custom_id": "x", "url": "/v1/completions", "body": []}',
    "method is 'GET'; it must be POST": '{"custom_id": "x", "method": "GET", "url": "/v1/completions", "body": {}}',
    "url is '/v1/rerank'": '{"custom_id": "x", "url": "/v1/rerank", "body": {}}',
    "not valid JSON": '{"custom_id": "\xff"}',
    "Expected object, got str": '"text"',
}


@pytest.mark.parametrize("message", WRONG_LINES)
def test_wrong_lines(message: str) -> None:
    found = parse_line(0, 7, WRONG_LINES[message].encode("latin-1"))
    assert isinstance(found, BadLine) and message in found.problem
    assert found.custom_id == ("x" if '"custom_id": "x"' in WRONG_LINES[message] else None)


def test_nesting_without_end_is_one_bad_line() -> None:
    assert isinstance(parse_line(0, 1, b'{"custom_id":"x","body":' + b"[" * 100_000), BadLine)


def test_lines_that_are_too_long_are_never_read_whole(tmp_path: Path) -> None:
    fits = json.dumps(request("a", prompt="x"))
    file = tmp_path / "in"
    file.write_bytes(b"\xef\xbb\xbf" + fits.encode() + b"\r\n" + b"y" * 3_000_000 + b"\n" + b"z" * (len(fits) + 1))
    assert check_file(file, len(fits) + 3) == 2 + 1
    first, second, third = read_requests(file, len(fits))
    assert isinstance(second, BadLine) and second.code == "line_too_long" and second.line == 2
    assert isinstance(third, BadLine) and third.code == "line_too_long"
    first, second, third = read_requests(file, len(fits) + 3)  # the mark at the beginning takes three bytes
    assert not isinstance(first, BadLine) and first.custom_id == "a" and isinstance(second, BadLine)
    assert isinstance(third, BadLine) and third.code == "invalid_json"


def test_results_keep_the_order_and_replace_the_file_at_the_end(tmp_path: Path) -> None:
    file = tmp_path / "out"
    file.write_text("before")
    with BatchOutput(file, 3) as output:
        for place in (2, 0, 1):
            output.write(place, {"place": place, "text": "é\n"})
        assert file.read_text() == "before"
        output.finish()
    assert [line["place"] for line in read(file)] == [0, 1, 2] and os.listdir(tmp_path) == ["out"]


def test_a_dead_engine_ends_the_batch_and_keeps_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = stub_engine()
    source = write(tmp_path, *(request(f"r{i}", prompt="one", max_tokens=2) for i in range(50)))
    count = 0
    write_result = BatchOutput.write

    def dying(output: BatchOutput, place: int, result: dict[str, Any]) -> None:
        nonlocal count
        count += 1
        if count == 5:
            engine.die("out of memory")
        write_result(output, place, result)

    monkeypatch.setattr(BatchOutput, "write", dying)
    monkeypatch.setattr("quire.engine.async_llm.AsyncLLM", lambda config: engine)
    argv = ["run-batch", "-i", str(source), "-o", str(tmp_path / "out"), "--max-concurrency", "2"]
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert "the engine has died: out of memory" in error and "results, in order of completion" in error
    kept = read(tmp_path / "out.partial")
    assert 5 <= len(kept) < 50 and all(line["response"]["status_code"] == 200 for line in kept)
    assert not (tmp_path / "out").exists()


def num_long(server: StubServer) -> int:
    return sum(one.params.max_tokens != 1 for one, _ in server.engine.running.values())


def test_ctrl_c_keeps_finished_results(tmp_path: Path) -> None:
    with stub_server(stub_engine(0.005)) as server:
        lines = [request(f"r{i}", prompt="one", max_tokens=1 if i < 4 else 100_000) for i in range(20)]
        source, out = write(tmp_path, *lines), tmp_path / "out"
        command = ["run-batch", "-i", str(source), "-o", str(out), "--url", server.url, "--max-concurrency", "6"]
        child = subprocess.Popen([sys.executable, "-m", "quire", *command], stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 30
        while server.in_loop(lambda: num_long(server)) < 6 and time.monotonic() < deadline:
            pass
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=20)
        assert child.returncode == 130 and "Traceback" not in err
        assert f"{out}.partial holds 4 of 20 results" in err
        server.wait_until(lambda: not server.engine.running)  # closed connections ended them
    assert not out.exists() and len(read(tmp_path / "out.partial")) == 4


def test_only_lines_that_are_no_requests_fail_the_command(tmp_path: Path, server: StubServer) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    argv = ["run-batch", "-i", str(source), "-o", str(out), "--url", f"{server.url}/v1"]
    source.write_text("\n\n")
    assert main(argv) == 0 and out.read_text() == ""
    opened = out.open()
    write(tmp_path, GOOD[-1], *BAD[1:])
    assert main(argv) == 0 and len(read(out)) == 3
    assert len(opened.readlines()) == 3  # who opened the file before sees the results
    write(tmp_path, GOOD[0], {"no_id": 1})
    assert main(argv) == 1 and len(read(out)) == 2
