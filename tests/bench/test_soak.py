"""`quire bench soak` on the real server for a few seconds, and its checks."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from quire.bench.internal.soak.command import Memory, leftovers
from quire.bench.internal.soak.probe import PROMPTS, Probe
from quire.bench.internal.soak.server import WallClock
from quire.bench.processes import Process
from quire.bench.serve_client import Target
from quire.entrypoints.cli.main import main


@pytest.mark.slow
def test_a_short_soak_leaks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--minutes", "0.1", "--disconnects", "0.3", "--max-growth", "1e9", "--sample-seconds", "0.2"]
    code = main(["bench", "soak", *flags, "--num-gpu-blocks-override", "256", "--json"])
    details = json.loads(capsys.readouterr().out)["details"]
    assert code == 0 and details["problems"] == []
    outcomes = details["outcomes"]
    assert sum(outcomes.values()) == details["sent"] and outcomes["completed"] > 0
    state = details["state_afterwards"]
    assert state["core"]["blocks"] == state["core"]["blocks_free"] == 256
    assert {one["role"] for one in details["memory"]} == {"api", "engine"}


def test_leftovers_are_named() -> None:
    core = {"requests": 0, "rows": 0, "blocks": 8, "blocks_free": 8}
    state: dict[str, Any] = {"front_end": {"requests": 0, "jobs": 0}, "core": core}
    assert leftovers(state) == []
    state["front_end"]["jobs"] = 2
    core["blocks_free"] = 5
    assert leftovers(state) == ["2 left: front_end jobs", "3 of 8 blocks are not free"]


def test_growth_is_that_of_the_peaks_after_the_warm_up() -> None:
    """A jump at the start, then two megabytes a minute, with a dip that hides nothing and adds nothing."""
    sizes = [100, 300, *(300 + i for i in range(19))]
    sizes[8:12] = [250] * 4
    samples = iter(sizes)

    class Growing(Process):
        def resident_bytes(self) -> int:
            return next(samples) * 10**6

    memory = Memory([Growing(1, "engine")])
    for i in range(21):
        memory.sample(30.0 * i)
    (found,) = memory.growth_report(0.2)
    assert found["growth_mb_per_minute"] == pytest.approx(2.0)
    assert (found["first_mb"], found["last_mb"]) == (100, 318)


@pytest.mark.slow
def test_a_short_chaos_loses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--minutes", "0.4", "--chaos-interval", "3", "--chaos-seed", "3", "--concurrency", "4"]
    code = main(["bench", "soak", "--chaos", *flags, "--num-gpu-blocks-override", "256", "--json"])
    details = json.loads(capsys.readouterr().out)["details"]
    assert code == 0, details
    assert sum(details["chaos"].values()) > 0 and details["starts"] > 1
    assert sum(details["probes"].values()) > 0 and sum(details["outcomes"].values()) > 0


def response(text: str, token_ids: list[int]) -> bytes:
    return json.dumps({"choices": [{"text": text, "token_ids": token_ids}]}).encode()


def test_a_response_of_another_request_is_detected() -> None:
    probe = Probe(Target("http://127.0.0.1:1"))
    probe.known = [[10 * i + j for j in range(16)] for i in range(len(PROMPTS))]
    mine, other = probe.known[:2]
    assert probe.classify(0, 200, response(PROMPTS[0] + " yes", mine)) == "right"
    assert probe.classify(0, 200, response(PROMPTS[1] + " yes", mine)) == "mixed up"
    assert probe.classify(0, 200, response(PROMPTS[0] + " yes", other)) == "mixed up"
    assert probe.classify(0, 200, response(PROMPTS[0] + " yes", [*mine[:15], 99])) == "drifted"
    assert probe.classify(0, 503, b"") == "ended"
    probe.sent, probe.outcomes = 3, Counter({"right": 1, "mixed up": 1})
    assert probe.problems() == ["1 probes: mixed up", "3 probes were sent, 2 accounted for"]


def test_only_the_server_sees_another_wall_clock(tmp_path: Path) -> None:
    clock = WallClock(tmp_path)
    if not clock.available:
        pytest.skip("there is no C compiler")

    def read() -> float:
        code = "import time; print(time.time(), time.time_ns() / 1e9)"
        out = subprocess.run([sys.executable, "-c", code], env=os.environ | clock.environment(), capture_output=True)
        assert out.returncode == 0, out.stderr
        one, other = map(float, out.stdout.split())
        assert abs(one - other) < 60
        return one

    assert abs(read() - time.time()) < 60
    clock.step(86_400)
    assert abs(read() - 86_400 - time.time()) < 60
