"""`quire bench serve` against a real server on a stub engine; its figures from hand-made records."""

import asyncio
import json
import math
from argparse import Namespace
from array import array
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from quire.bench import serve
from quire.bench.datasets import items
from quire.bench.processes import server_processes
from quire.bench.serve_child import as_flags
from quire.bench.serve_client import EventReader, Record, Request, Run, Target
from quire.bench.serve_drive import Plan, split
from quire.bench.serve_rows import ROWS
from quire.bench.serve_stats import goodput_limits, metrics, peak_concurrency, summarize
from quire.bench.serve_workloads import arrivals
from quire.bench.texts import LocalTexts
from quire.entrypoints.cli.main import main
from tests.entrypoints.stub_server import StubServer, stub_engine, stub_server


@pytest.fixture(scope="module")
def server() -> Iterator[StubServer]:
    with stub_server(stub_engine()) as one:
        yield one


def bench(server: StubServer, capsys: pytest.CaptureFixture[str], *flags: str, code: int = 0) -> dict[str, Any]:
    assert main(["bench", "serve", "--base-url", server.url, "--json", *flags]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_counts_every_token(
    server: StubServer, capsys: pytest.CaptureFixture[str], endpoint: str, processes: int
) -> None:
    report = bench(
        server,
        capsys,
        *("--endpoint", endpoint, "--num-prompts", "12", "--random-input-len", "20", "--random-output-len", "30"),
        *("--request-rate", "200", "--ignore-eos", "--client-processes", str(processes), "--repetitions", "2"),
        *("--goodput", "ttft:100000,tpot:100000"),
    )
    for one in report["details"]["runs"]:
        assert (one["completed"], one["failed"], one["output_tokens"]) == (12, 0, 12 * 30)
        assert one["tokens_counted_by"] == ["usage"] and 1 <= one["peak_concurrency"] <= 12
        if "chat" not in endpoint:
            assert one["prompt_tokens"] == 12 * 20
    figures = report["metrics"]
    assert len(figures["output"]["values"]) == 2
    assert figures["goodput"]["median"] == figures["requests"]["median"]
    assert {"ttft_mean", "ttft_p50", "tpot_p99", "itl_p90", "e2el_p99"} <= set(figures)
    assert figures["e2el_p50"]["median"] >= figures["ttft_p50"]["median"] > 0
    assert {"date", "quire", "cpu"} <= set(report["machine"])


def test_shared_prefixes_and_files(server: StubServer, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ["--dataset-name", "prefix_repetition", "--num-prompts", "6", "--prefix-repetition-num-prefixes", "2"]
    flags += ["--prefix-repetition-prefix-len", "40", "--prefix-repetition-suffix-len", "8", "--max-concurrency", "2"]
    run = bench(server, capsys, *flags, "--prefix-repetition-output-len", "5", "--ignore-eos")["details"]["runs"][0]
    assert (run["prompt_tokens"], run["output_tokens"], run["peak_concurrency"]) == (6 * 48, 6 * 5, 2)

    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Hello there", "output_tokens": 7}\n\n{"prompt": [5, 6, 7]}\n')
    flags = ["--dataset-name", "custom", "--dataset-path", str(file), "--no-oversample"]
    assert bench(server, capsys, *flags)["details"]["runs"][0]["output_tokens"] == 7 + 256


def test_errors_are_counted_by_kind(server: StubServer, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine", "output_tokens": 2}\n{"prompt": [99999999], "output_tokens": 2}\n')
    flags = ("--dataset-name", "custom", "--dataset-path", str(file), "--no-oversample")
    (run,) = bench(server, capsys, *flags, code=1)["details"]["runs"]
    assert run["completed"] == 1 and run["errors"] == {"HTTP 400 invalid_request_error": 1}


def test_result_file_and_plot(server: StubServer, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result, picture = tmp_path / "result.json", tmp_path / "run.png"
    flags = ["--num-prompts", "4", "--random-input-len", "5", "--random-output-len", "6"]
    bench(server, capsys, *flags, "--result-file", str(result), "--plot", str(picture))
    assert json.loads(result.read_text())["benchmark"] == "serve"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--base-url", "localhost:1"], "write http://HOST:PORT"),
        (["--port", "1"], "no server responds at http://127.0.0.1:1"),
        (["--goodput", "speed:1"], "write ttft:MS"),
        (["--max-concurrency", "0"], "--max-concurrency: 0 is too small"),
        (["--percentile-metrics", "ttft,speed"], "'speed' is not a latency"),
        (["--request-rate", "0"], "must be above 0"),
        (["--plot", "run.pdf", "--port", "1"], "use a name ending in .png"),
        (["--block-size", "0"], "block_size is 0"),
    ],
)
def test_mistakes_are_explained(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["bench", "serve", *flags])
    except SystemExit as stopped:
        code = stopped.code  # type: ignore[assignment]
    assert code == 2 and message in capsys.readouterr().err


def test_a_file_without_prompts_is_explained(server: StubServer, tmp_path: Path) -> None:
    assert server.engine.tokenizer is not None
    texts = LocalTexts(server.engine.tokenizer)
    args = serve.parser().parse(["--dataset-name", "custom", "--dataset-path", str(tmp_path / "f"), "--port", "1"])
    for text, message in (("{", "line 1 is not JSON"), ('{"prompt": 5}', "line 1 has no prompt"), ("", "no prompts")):
        (tmp_path / "f").write_text(text)
        with pytest.raises(ValueError, match=message):
            items(args, 0, texts)


def record(index: int, sent: float, events: list[float], tokens: int, error: str | None = None) -> Record:
    ended = events[-1] if events else sent
    return Record(index, None, sent, ended, array("d", events), 10, tokens, error=error)


def test_figures_of_known_records() -> None:
    run = Run(
        100.0,
        [
            record(0, 100.0, [100.1, 100.2, 100.4], 5),  # two of its events have two tokens
            record(1, 100.0, [100.3], 1),
            record(2, 100.1, [], 0, "HTTP 503 overloaded"),
        ],
    )
    stats = summarize(run, goodput_limits("ttft:200,tpot:80"))
    assert math.isclose(stats.duration, 0.4) and stats.errors == {"HTTP 503 overloaded": 1}
    assert stats.latencies["ttft"] == pytest.approx([100, 300])
    assert stats.latencies["tpot"] == pytest.approx([75])  # 300 ms for the four tokens after the first
    assert stats.latencies["itl"] == pytest.approx([100, 200])
    assert stats.latencies["e2el"] == pytest.approx([400, 300])
    assert stats.good == 1 and stats.output_tokens == 6
    figures = {metric.name: metric.median for metric in metrics([stats], ["ttft"], [50, 99])}
    assert figures["output"] == pytest.approx(15) and figures["requests"] == pytest.approx(5)
    assert figures["ttft mean"] == pytest.approx(200) and figures["ttft p50"] == pytest.approx(200)
    assert peak_concurrency(run.records) == 2


def test_events_that_arrive_in_pieces() -> None:
    one = Record(0)
    reader = EventReader(one, keep_text=True)
    stream = (
        b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
        b": a comment\n\n"
        b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
        b'data: {"choices":[{"index":0,"delta":{"content":"bc"}}]}\n\n'
        b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
        b'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":3}}\n\n'
        b"data: [DONE]\n\n"
    )
    for i in range(0, len(stream), 7):
        reader.feed(stream[i : i + 7])
    reader.close()
    assert reader.finished and len(one.events) == 2
    assert (one.prompt_tokens, one.output_tokens, one.texts) == (4, 3, {0: ["a", "bc"]})


def test_arrivals_have_the_requested_rate() -> None:
    assert arrivals(3, float("inf"), 1.0, 0) == [0.0, 0.0, 0.0]
    times = arrivals(1000, 50.0, 1.0, 0)
    assert times == sorted(times) and math.isclose(times[-1], 20.0)
    assert times == arrivals(1000, 50.0, 1.0, 0) != arrivals(1000, 50.0, 1.0, 1)

    def spread(burstiness: float) -> float:
        found = arrivals(1000, 50.0, burstiness, 0)
        return max(b - a for a, b in pairwise(found))

    assert spread(0.2) > spread(1.0) > spread(100.0)


def test_client_processes_share_requests_and_concurrency() -> None:
    plan = Plan(Target("http://x"), "/", 5, [Request(i, {}) for i in range(7)])
    parts = split(plan, 3)
    assert sorted(request.index for part in parts for request in part.requests) == list(range(7))
    assert [part.max_concurrency for part in parts] == [2, 2, 1]
    with pytest.raises(ValueError, match="cannot share a concurrency"):
        split(plan, 6)


def test_rows_are_the_reference_workloads() -> None:
    args = Namespace(seed=0, **ROWS["h200-32"].flags())
    found = items(args, 0)
    assert len(found) == 512 and {(len(one.prompt), one.output_len) for one in found} == {(512, 128)}


def test_flags_for_the_server_that_is_started() -> None:
    options = {"model": "m", "enable_prefix_caching": False, "async_scheduling": True, "max_model_len": 5}
    flags = ["--model", "m", "--no-enable-prefix-caching", "--async-scheduling", "--max-model-len", "5"]
    assert as_flags(options) == flags


def test_processes_have_roles() -> None:
    """This process has torch loaded: by the rule it is an engine."""
    import os

    import torch  # noqa: F401

    mine = server_processes(os.getpid())[0]
    assert (mine.pid, mine.role) == (os.getpid(), "engine")
    assert mine.resident_bytes() > 1e7 and mine.cpu_seconds() > 0


def test_an_unreachable_server_is_an_error_of_each_request() -> None:
    from quire.bench.serve_client import Client

    async def send() -> Record:
        return await Client(Target("http://127.0.0.1:1"), "/").send(0, b"GET / HTTP/1.1\r\n\r\n")

    assert asyncio.run(send()).error == "no connection: ConnectionRefusedError"
