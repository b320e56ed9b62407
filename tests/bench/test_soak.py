"""`quire bench soak` on the real server for a few seconds, and what it would have found."""

import json
from typing import Any

import pytest

from quire.bench.processes import Process
from quire.bench.soak import Memory, leftovers
from quire.entrypoints.cli.main import main


@pytest.mark.slow
def test_a_short_soak_leaves_nothing_behind(capsys: pytest.CaptureFixture[str]) -> None:
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
    (found,) = memory.judged(0.2)
    assert found["growth_mb_per_minute"] == pytest.approx(2.0)
    assert (found["first_mb"], found["last_mb"]) == (100, 318)
