import json
import math
import os
import tarfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import quire
from quire.bench.internal import anchors
from quire.bench.internal.anchors import CPU_BARS, H200_BARS, SERVING_BARS, Bar
from quire.bench.internal.card import child, models
from quire.bench.internal.card.child import (
    Event,
    Failed,
    Measured,
    PartStarted,
    Started,
    Task,
    child_main,
    run_task,
    triton_cache_files,
)
from quire.bench.internal.card.command import Recorder, heading
from quire.bench.internal.card.figures import CPU_ROWS, H200_ROWS, Figure, ModelCard, Row, table
from quire.bench.internal.card.profile import _by_name, _covered, profile_text, short
from quire.bench.internal.card.serving import SHOWN, _add, row_names
from quire.bench.internal.card.workloads import GPU_WORKLOADS, Caller, measure
from quire.bench.workloads import GPU_SHAPES, MODEL_SHAPES, TINY_SHAPE, gpu_workload
from quire.entrypoints.cli.main import main
from quire.messages.protocol import EngineSummary

TIME = Row("time", "ms", lower_is_better=True)
RATE = Row("rate", "tok/s")


# Figures and table


def test_ratio_and_verdict_know_which_way_is_better() -> None:
    slow = Figure(TIME, [2.0, 9.0, 3.0], Bar(vllm=6.0, must=2.5, moonshot=1.0))
    assert (slow.value, slow.times_better_than(6.0), slow.verdict) == (3.0, 2.0, "missed")
    assert Figure(TIME, [2.5], slow.bar).verdict == "must"
    assert Figure(RATE, [30.0], Bar(vllm=10.0, must=20.0, moonshot=30.0)).verdict == "moonshot"
    assert Figure(RATE, [30.0], Bar(vllm=10.0)).verdict == ""


def test_table_shows_figures_goals_and_failures() -> None:
    card = ModelCard("qwen3-0.6b")
    card.figures["nano"] = Figure(H200_ROWS["nano"], [25_200.0], H200_BARS["qwen3-0.6b"]["nano"])
    card.errors["ctx6k"] = "OutOfMemoryError: " + 40 * "much "
    lines = table([card]).splitlines()
    cells = "25,200 20,160 1.25 x 34,300 26,000 29,000 missed"
    assert " ".join(lines[1].split()) == f"nano, temperature 0.6, output, tok/s {cells}"
    assert lines[2].startswith("  ctx6k: FAILED: OutOfMemoryError: much") and lines[2].endswith("...")


def test_llama_cpp_has_columns_where_there_are_such_figures() -> None:
    card = ModelCard("smollm2")
    card.figures["throughput"] = Figure(CPU_ROWS["throughput"], [654.0], CPU_BARS["smollm2"]["throughput"])
    head, line = table([card]).splitlines()
    assert "llama.cpp" in head
    assert "327 Q4     2.00 x" in line


@pytest.mark.parametrize(
    ("cpu", "cores", "has_amx", "same"),
    [
        ("Intel(R) Xeon(R) Platinum 8481C", 2, True, True),
        ("Intel(R) Xeon(R) Platinum 8481C", 2, False, False),
        ("Intel(R) Xeon(R) Platinum 8481C", 16, True, False),
        ("AMD EPYC 7B13", 2, False, False),
    ],
)
def test_ratios_to_other_engines_are_of_the_machine_they_were_measured_on(
    cpu: str, cores: int, has_amx: bool, same: bool
) -> None:
    assert anchors.measured_on(cpu, cores, has_amx) is same
    recorder = Recorder(Task("smollm2", {}, 49152, ["throughput"], cpu=True), peers=same)
    recorder.on_event(Measured("throughput", 0, {"throughput": 654.0}, {}, 0.0), 0.0)
    head, line = table([recorder.card]).splitlines()
    assert ("llama.cpp" in head, "0.72 x" in line, "2.00 x" in line) == (same, same, same)
    assert "1,200" in line and line.endswith("missed")  # our own goals stay
    told = heading({"machine": {"cpu": cpu}, "engine_flags": {}}, cpu=True, peers=same)
    assert ("no ratios to other engines" in told) is not same


def test_every_reference_number_has_its_row() -> None:
    for model, bars in H200_BARS.items():
        assert set(bars) - {"server_startup"} <= set(H200_ROWS), model
    for bars in CPU_BARS.values():
        assert set(bars) <= set(CPU_ROWS)
    for goals in SERVING_BARS.values():
        assert set(goals) <= set(SHOWN)


# Workloads, on an engine whose time is known


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@dataclass
class FakeLLM:
    """Takes 0.1 s for prompts and 0.01 s for each token after the first. `fails` may raise before a call."""

    clock: Clock
    token_limit: int = 10**9
    calls: list[Any] = field(default_factory=list)
    fails: Any = lambda *_: None

    def generate(self, prompts: list[list[int]], params: list[Any], use_tqdm: bool) -> list[Any]:
        self.fails(self, params)
        lengths = [min(p.max_tokens, self.token_limit) for p in params]
        self.clock.now += 0.1 + 0.01 * (max(lengths) - 1)
        self.calls.append((len(prompts), params[0].temperature))
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * length)], error=None) for length in lengths]

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset")

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    llm_engine = SimpleNamespace(
        client=SimpleNamespace(core=SimpleNamespace(summary=EngineSummary("a device", "a cache")))
    )


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    fake = FakeLLM(Clock())
    monkeypatch.setattr("quire.bench.common.time", fake.clock)
    monkeypatch.setitem(vars(quire), "LLM", lambda **kwargs: fake)
    return fake


def gpu_figures(llm: FakeLLM, name: str) -> dict[str, float]:
    return measure(Caller(llm, 151_936), name, 0, cpu=False, qwen=True).figures  # type: ignore[arg-type]


def test_b1_separates_first_token_and_the_rest(llm: FakeLLM) -> None:
    figures = gpu_figures(llm, "b1")
    assert math.isclose(figures["b1_ttft"], 100) and math.isclose(figures["b1_tpot"], 10)
    assert llm.calls == ["reset", (1, 0.0)] * 6


def test_nano_is_sampled_and_then_greedy(llm: FakeLLM) -> None:
    lengths = gpu_workload("nano", 151_936).output_lens
    seconds = 0.1 + 0.01 * (max(lengths) - 1)
    assert math.isclose(gpu_figures(llm, "nano")["nano"], sum(lengths) / seconds)
    gpu_figures(llm, "nano_greedy")
    assert llm.calls == ["reset", (256, 0.6), "reset", (256, 0.0)]


def test_rates_count_the_right_tokens(llm: FakeLLM) -> None:
    assert math.isclose(gpu_figures(llm, "t512_128")["t512_128"], 1024 * 640 / 1.37)
    assert math.isclose(gpu_figures(llm, "prefill")["prefill"], 64 * 2048 / 0.1)
    assert math.isclose(gpu_figures(llm, "ctx6k")["ctx6k"], 10)


def test_prefix_is_cached_before_it_is_timed(llm: FakeLLM) -> None:
    assert math.isclose(gpu_figures(llm, "prefix")["prefix"], 0.1 + 0.63)
    assert llm.calls == ["reset", (1, 0.0), (256, 0.0)]


def test_cpu_figures(llm: FakeLLM) -> None:
    caller = Caller(llm, 49_152)  # type: ignore[arg-type]
    found: dict[str, float] = {}
    for name in ("latency", "throughput", "prefix", "prefill"):
        found |= measure(caller, name, 0, cpu=True, qwen=False).figures
    expected = {"latency_ttft": 100, "latency_decode": 100, "throughput": 64 * 128 / 1.37}
    for name, value in (expected | {"prefix": 0.41, "prefill": 8 * 1024 / 0.1}).items():
        assert math.isclose(found[name], value), name


# The child


class Pipe:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, event: Any) -> None:
        self.sent.append(event)

    def named(self, kind: type) -> list[str]:
        return [event.part for event in self.sent if isinstance(event, kind)]


def tiny_task(workloads: list[str], **changes: Any) -> Task:
    return Task("tiny", {}, TINY_SHAPE["vocab_size"], workloads, tiny=True, **changes)


def run_fake_child(workloads: list[str], **changes: Any) -> Pipe:
    pipe = Pipe()
    child_main(pipe, tiny_task(workloads, **changes))  # type: ignore[arg-type]
    return pipe


def test_a_failing_workload_does_not_stop_the_others(llm: FakeLLM) -> None:
    def fails(llm: FakeLLM, params: list[Any]) -> None:
        if params[0].temperature > 0:
            raise RuntimeError("out of memory")

    llm.fails = fails
    pipe = run_fake_child(["b1", "nano", "nano_greedy"], repetitions=2)
    assert pipe.named(Measured) == ["b1", "b1", "nano_greedy", "nano_greedy"]
    assert [event for event in pipe.sent if isinstance(event, Failed)] == [
        Failed("nano", "RuntimeError: out of memory")
    ]
    assert pipe.named(PartStarted) == ["start-up", "b1", "nano", "nano_greedy", "shut-down"]
    assert llm.calls[-1] == "shutdown"


def test_an_engine_that_stays_broken_is_abandoned(llm: FakeLLM) -> None:
    broken = []

    def fails(llm: FakeLLM, params: list[Any]) -> None:
        if params[0].temperature > 0 or broken:
            broken.append(True)
            raise RuntimeError("illegal memory access")

    llm.fails = fails
    pipe = run_fake_child(["b1", "nano", "nano_greedy"])
    assert pipe.named(PartStarted) == ["start-up", "b1", "nano"]


def test_a_wrong_length_is_an_error(llm: FakeLLM) -> None:
    def limit_from_now_on(llm: FakeLLM, params: list[Any]) -> None:
        if max(p.max_tokens for p in params) > 4:
            llm.token_limit = 4

    llm.fails = limit_from_now_on
    (failed,) = [event for event in run_fake_child(["b1"]).sent if isinstance(event, Failed)]
    assert "4 tokens were generated instead of 9" in failed.error


def test_an_engine_that_cannot_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**kwargs: Any) -> None:
        raise ValueError("no such device")

    monkeypatch.setitem(vars(quire), "LLM", refuse)
    assert run_fake_child(["b1"]).sent == [PartStarted("start-up"), Failed("start-up", "ValueError: no such device")]


def test_triton_cache_is_counted_in_the_configured_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert triton_cache_files() == 0
    (tmp_path / "abc").mkdir()
    (tmp_path / "abc" / "kernel.cubin").write_bytes(b"")
    assert triton_cache_files() == 1


# The parent, with children that misbehave


def misbehaving_child(pipe: Connection, task: Task) -> None:
    pipe.send(PartStarted("start-up"))
    pipe.send(Started({}, (0, 0), {}))
    for part in task.parts:
        pipe.send(PartStarted(part))
        if part == "nano":
            os._exit(7)
        if part == "prefill":
            threading.Event().wait()
        pipe.send(Measured(part, 0, {}, {}, 0.0))
    pipe.send(PartStarted("shut-down"))


def test_workloads_after_a_crash_or_a_hang_run_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "child_main", misbehaving_child)
    events: list[Any] = []
    task = tiny_task(["b1", "nano", "prefill", "prefix"], profile_batches=[1])
    run_task(task, 10, lambda event, started: events.append(event))
    assert [event.part for event in events if isinstance(event, Measured)] == ["b1", "prefix", "profile"]
    assert [event for event in events if isinstance(event, Failed)] == [
        Failed("nano", "the process ended with exit code 7"),
        Failed("prefill", "no result for 10 s, so it was killed (--limit)"),
    ]
    assert len([event for event in events if isinstance(event, Started)]) == 3


# The whole card, on the tiny model


def read_card(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text("utf-8"))


def test_a_tiny_card_from_start_to_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "card.json"
    flags = ["--device", "cpu", "--profile", "--profile-batches", "1,3", "--output", str(file)]
    code = main(["bench", "card", "--models", "tiny", *flags])
    text = capfd.readouterr().out
    assert code == 0, text
    found = read_card(file)
    tiny = found["models"]["tiny"]
    rows = set(tiny["figures"]) - {"startup_warm", "startup_cold"}
    assert rows == {"b1_ttft", "b1_tpot", *GPU_WORKLOADS} - {"b1"}
    assert tiny["errors"] == {}
    assert set(tiny["elapsed"]) == set(GPU_WORKLOADS)
    assert tiny["figures"]["b1_ttft"]["raw"][0]["to_first"][2] > 0
    assert tiny["options"]["max_num_batched_tokens"] == 16384
    assert {"date", "commit", "torch"} <= set(found["machine"])
    assert [(one["batch"], one["rows"], one["tokens"]) for one in tiny["profile"]] == [(1, 1, 1), (3, 3, 3)]
    assert tiny["profile"][1]["device"]["kernels"]
    lines = text.splitlines()
    assert lines[-1].startswith("whole card:")
    assert any(line.startswith("  ctx6k time per output token, ms") for line in lines[-12:])


def test_an_interrupted_card_writes_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(task: Task, limit: float, on_event: Callable[[Event, float], None]) -> None:
        on_event(Measured("prefill", 0, {"prefill": 1000.0}, {}, 1.0), 0.0)
        raise KeyboardInterrupt

    monkeypatch.setattr("quire.bench.internal.card.command.run_task", interrupted)
    file = tmp_path / "card.json"
    assert main(["bench", "card", "--models", "tiny", "--device", "cpu", "--output", str(file)]) == 130
    assert read_card(file)["models"]["tiny"]["figures"]["prefill"]["values"] == [1000.0]


def test_a_tiny_cpu_card(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "card.json"
    flags = ["--cpu", "--models", "tiny", "--no-probe", "--repetitions", "2", "--output", str(file)]
    code = main(["bench", "card", *flags, "--commit", "abc"])
    assert code == 0, capfd.readouterr().out
    found = read_card(file)
    figures = found["models"]["tiny"]["figures"]
    assert set(figures) == set(CPU_ROWS)
    assert len(figures["latency_decode"]["values"]) == len(figures["prefix"]["values"]) == 2
    assert found["machine"]["commit"] == "abc"


def test_a_tiny_card_over_http(tmp_path: Path, capfd: pytest.CaptureFixture[str], byte_tokenizer: Path) -> None:
    file = tmp_path / "card.json"
    flags = ["--workloads", "startup", "--serving", "--serving-rates", "at-once,32", "--output", str(file)]
    given = ["--device", "cpu", "--tokenizer", str(byte_tokenizer)]
    code = main(["bench", "card", "--models", "tiny", *flags, *given])
    assert code == 0, capfd.readouterr().out
    figures = read_card(file)["models"]["tiny"]["figures"]
    assert {"server_startup", "h200-at-once output", "h200-32 itl p99"} <= set(figures)
    assert "h200-8 output" not in figures


@pytest.fixture
def byte_tokenizer(tmp_path: Path) -> Path:
    """Packed as an archive, with an entry for every id of the tiny model."""
    from tokenizers import Tokenizer, models

    vocabulary = {f"w{i} ": i for i in range(TINY_SHAPE["vocab_size"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="w0 "))
    file, archive = tmp_path / "tokenizer.json", tmp_path / "tokenizer.tar.xz"
    backend.save(str(file))
    with tarfile.open(archive, "w:xz") as packed:
        packed.add(file, "tokenizer.json")
    return archive


# Flags


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--models", "gpt2"], "--models: 'gpt2' is not on this card; allowed: qwen3-0.6b, llama3-8b"),
        (["--cpu", "--models", "llama3-8b"], "is not on this card; allowed: smollm2, smollm2-q4_1, qwen3-0.6b"),
        (["--workloads", "b2"], "--workloads: 'b2' is unknown; allowed: b1, nano"),
        (["--serving"], "qwen3-0.6b is a shape without a tokenizer"),
        (["--serving", "--serving-rates", "7"], "--serving-rates: '7' is unknown; allowed: at-once, 32, 8"),
        (["--block-size", "0"], "block_size is 0"),
    ],
)
def test_mistakes_are_explained(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "card", *argv]) == 2
    assert message in capsys.readouterr().err


def test_an_architecture_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "ARCHITECTURES", {})
    assert main(["bench", "card", "--models", "qwen3-30b-a3b"]) == 2
    assert "needs Qwen3MoeForCausalLM, which Quire does not have yet" in capsys.readouterr().err


def test_fp8_is_the_same_shape_quantized(tmp_path: Path) -> None:
    options = models.engine_options("llama3-8b-fp8", tmp_path, cpu=False)
    assert options["quantization"] == "fp8"
    config = json.loads(Path(options["model"], "config.json").read_text("utf-8"))
    assert config == MODEL_SHAPES["llama3-8b"]


def test_default_workloads_are_those_with_reference_numbers() -> None:
    assert models.workload_names(None, "qwen3-0.6b", cpu=True) == ["latency", "throughput"]
    assert models.workload_names(None, "smollm2", cpu=True) == ["latency", "throughput", "prefix", "prefill"]
    assert set(models.workload_names(None, "llama3-8b", cpu=False)) == {*GPU_SHAPES, "nano", "nano_greedy"}
    assert models.workload_names("startup", "llama3-8b", cpu=False) == []


# Serving rows


def test_serving_rows_meet_their_goals() -> None:
    assert SERVING_BARS["h200-32"]["ttft p99"] == Bar(vllm=104, must=70, moonshot=40)
    assert SERVING_BARS["cpu-4"]["tpot p50"].llama_cpp == 24.8
    assert row_names(True, []) == ["cpu-at-once", "cpu-4"]


def test_failed_and_short_requests_are_errors() -> None:
    run = {"failed": 3, "errors": {"HTTP 500": 3}, "output_tokens": 99, "completed": 1}
    report = {
        "workload": {"output_len": 128},
        "metrics": {"output": {"unit": "tok/s", "values": [25_514.0]}},
        "details": {"runs": [run]},
    }
    card = ModelCard("qwen3-0.6b")
    _add(card, "h200-at-once", report, anchored=True)
    assert card.errors == {"h200-at-once": "3 requests failed: {'HTTP 500': 3}; 99 tokens from 1 requests of 128"}
    assert card.figures["h200-at-once output"].times_better_than(12_757) == 2


# Profiles


def test_overlapping_kernels_count_once() -> None:
    assert _covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]) == 4.0


def test_kernels_are_grouped_and_ordered_by_time() -> None:
    found = _by_name([("a", 1.0), ("b", 6.0), ("a", 1.0)], steps=2)
    assert [one["name"] for one in found] == ["b", "a"]
    assert found[1] == {"name": "a", "per_step": 1.0, "mean": 1.0, "step": 1.0, "share": 0.25}


def test_kernel_names_are_short() -> None:
    assert short("void at::native::vectorized_elementwise_kernel<4>") == "vectorized_elementwise_kernel<4>"
    assert len(short("k" * 500)) < 100


def test_without_profiling_support_host_times_remain() -> None:
    times = {"engine_thread": {"schedule": 12.0}, "worker_thread": {"execute": 30.0}}
    profile = {"batch": 1, "prompt_len": 512, "step": 50.0, "steps": 20, **times, "device": {"error": "no CUPTI"}}
    text = profile_text("qwen3-0.6b", profile)
    assert "schedule 12" in text and text.endswith("not profiled: no CUPTI")
