import json
import math
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

import quire
from quire.bench import machine, startup
from quire.entrypoints.cli.main import main


class Clock:
    """Advances only when the fake engine works."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@dataclass
class FakeLLM:
    """Takes 0.1 s for a prompt and 0.01 s for each token after the first, and counts cache resets."""

    clock: Clock
    token_limit: int = 10**9
    resets: int = 0
    calls: list[list[int]] = field(default_factory=list)

    def generate(
        self, prompts: list[list[int]], params: list[Any], use_tqdm: bool, lora_request: Any = None
    ) -> list[Any]:
        lengths = [min(p.max_tokens, self.token_limit) for p in params]
        self.clock.now += 0.1 + 0.01 * (max(lengths) - 1)
        self.calls.append([len(prompt) for prompt in prompts])
        assert all(p.ignore_eos and p.temperature == 0 and not p.detokenize for p in params)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * length)]) for length in lengths]

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def shutdown(self) -> None:
        pass


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    fake = FakeLLM(Clock())
    monkeypatch.setattr("quire.bench.common.time", fake.clock)
    monkeypatch.setitem(vars(quire), "LLM", lambda **kwargs: fake)
    return fake


def bench_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["bench", *argv, "--json", "--no-probe"]) == 0
    return json.loads(capsys.readouterr().out)


def test_throughput_of_the_reference_workload(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    report = bench_json(capsys, "throughput")
    assert report["workload"] == {"requests": 64, "input_len": 128, "output_len": 128}
    assert llm.calls[1:] == [[128] * 64] * 3
    assert llm.resets == 3
    output = report["metrics"]["output"]
    assert math.isclose(output["median"], 64 * 128 / 1.37)
    assert "anchors" not in output  # ratios to another machine's figures are meaningless
    assert {"date", "commit", "torch", "cpu", "cores"} <= set(report["machine"])


def test_latency_separates_first_token_and_decode(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = bench_json(capsys, "latency")["metrics"]
    assert math.isclose(metrics["time_to_first_token"]["best"], 100)
    assert math.isclose(metrics["decode"]["median"], 100)
    assert llm.resets == 6


def test_short_output_is_an_error_not_a_rate(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.token_limit = 5
    assert main(["bench", "throughput", "--no-probe"]) == 2
    assert "20 tokens were generated instead of 64" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["latency", "--output-len", "1"], "a decode rate needs at least 2"),
        (["throughput", "--repetitions", "0"], "--repetitions: 0 is too small; it must be at least 1"),
        (["startup", "--block-size", "0"], "block_size is 0; it must be between 1 and 1024"),
    ],
)
def test_mistakes_are_explained(
    argv: list[str], message: str, llm: FakeLLM, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["bench", *argv])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_startup_phases_are_differences_of_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = {"interpreter": 100.5, "import": 101.5, "load": 103.5, "first token": 104.0}
    stdout = f"a log line\n{json.dumps(marks)}\n"
    child = SimpleNamespace(returncode=0, stdout=stdout, stderr="")
    monkeypatch.setattr(startup, "subprocess", SimpleNamespace(run=lambda *args, **kwargs: child))
    monkeypatch.setattr(startup, "time", SimpleNamespace(time=lambda: 100.0))
    assert startup.start_once({}) == {"interpreter": 0.5, "import": 1.0, "load": 2.0, "first token": 0.5}


def test_startup_reports_why_the_process_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    child = SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nValueError: no such model\n")
    monkeypatch.setattr(startup, "subprocess", SimpleNamespace(run=lambda *args, **kwargs: child))
    with pytest.raises(ValueError, match="the measured process failed: ValueError: no such model"):
        startup.start_once({})


def test_a_probe_that_crashes_keeps_its_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    child = SimpleNamespace(returncode=-4, stdout='{"threads": 2}\n')
    monkeypatch.setattr(machine, "subprocess", SimpleNamespace(run=lambda *args, **kwargs: child))
    assert machine.run_probe() == {"threads": 2, "note": "the probe ended early with exit code -4"}


def test_python_m_quire_bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import runpy

    monkeypatch.setattr(sys, "argv", ["quire.bench", "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module("quire.bench", run_name="__main__")
    assert stopped.value.code == 0
    assert "bench startup" in capsys.readouterr().out
