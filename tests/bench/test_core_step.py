import json
from typing import Any

import numpy as np
import pytest

from quire.bench.internal.core_step import BLOCK_SIZE, StepTimes, by_blocks, core_steps, front_end_steps
from quire.engine.output_processor import OutputProcessor
from quire.engine.outputs import RequestOutput
from quire.entrypoints.cli.main import main
from quire.messages.requests import EngineCoreOutputs
from quire.messages.sampling_params import RequestOutputKind
from quire.tokenizer.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers.decoders import ByteLevel
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel as Splitter

    letters = {letter: i for i, letter in enumerate(sorted(Splitter.alphabet()))}
    backend = Backend(BPE(vocab=letters, merges=[]))
    backend.decoder = ByteLevel()
    return Tokenizer(backend)


@pytest.mark.parametrize("depth", [1, 2])
def test_every_measured_step_is_steady(depth: int) -> None:
    requests, steps = 4, 2 * BLOCK_SIZE
    measured = list(core_steps(requests, depth, steps))
    assert len(measured) == steps
    assert all(schedule > 0 and update > 0 for schedule, update, _ in measured)
    # Over two blocks' worth of tokens, each request is allocated two blocks and registers two.
    assert sum(blocks for _, _, blocks in measured) == 4 * requests


@pytest.mark.parametrize(
    ("kind", "wanted"), [(RequestOutputKind.DELTA, [3] * 8), (RequestOutputKind.FINAL_ONLY, [0] * 7 + [3])]
)
def test_front_end_outputs_are_those_the_users_want(
    kind: RequestOutputKind, wanted: list[int], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = OutputProcessor.process
    ready: list[list[RequestOutput]] = []

    def recording(self: OutputProcessor, outputs: EngineCoreOutputs) -> tuple[list[RequestOutput], list[str]]:
        found, ended = process(self, outputs)
        ready.append(found)
        return found, ended

    monkeypatch.setattr(OutputProcessor, "process", recording)
    times = list(front_end_steps(tokenizer, num_requests=3, kind=kind, steps=7))
    assert len(times) == 8 and min(times) > 0
    assert [len(found) for found in ready[-8:]] == wanted
    assert all(output.finished and output.outputs[0].text for output in ready[-1])


def test_steps_are_sorted_by_blocks() -> None:
    found = by_blocks(np.array([0, 1, 5, 4]), np.array([1e-6, 3e-6, 8e-6, 8e-6]), width=2)
    assert {name: (b["steps"], round(b["median"])) for name, b in found.items()} == {"0-1": (2, 2), "4-5": (2, 8)}


def test_growth_compares_the_ends_of_a_run() -> None:
    assert StepTimes("flat", "us", [2.0] * 100).growth == 1
    assert StepTimes("doubles", "us", [1.0] * 25 + [9.0] * 50 + [2.0] * 25).growth == 2


@pytest.fixture
def with_tokenizer(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.bench.internal.core_step.embedded_or_named", lambda model: tokenizer)


@pytest.mark.usefixtures("with_tokenizer")
def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "core", "--requests", "2", "--depth", "1", "--steps", "20"]
    assert main([*argv, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["workload"]["steps"] == 20
    assert {"commit", "cpu", "cores"} <= set(report["machine"])
    total = report["metrics"]["core_2_depth_1_total"]
    assert {"median", "mean", "p99", "growth"} <= set(total) and total["steps"] == 20
    assert sum(bucket["steps"] for bucket in total["by_blocks"].values()) == 20
    assert {"front_end_2_delta", "front_end_2_final_only", "front_end_2_final_only_last_step"} <= set(report["metrics"])

    assert main([*argv, "--cold"]) == 0
    text = capsys.readouterr().out
    assert "caches cold" in text and "core 2 depth 1 schedule" in text and "p99" in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--steps", "9000"], "--steps is 9000; at most 3933, so that no request reaches 4096 tokens"),
        (["--requests", "64,0"], "0 is too small; it must be at least 1"),
        (["--requests", "64,many"], "'many' is not a whole number"),
    ],
)
def test_mistakes_are_explained(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["bench", "core", *argv])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    assert message in capsys.readouterr().err
