"""vLLM's flags of `quire bench throughput`, `latency` and `startup`, with real engines on small models."""

import json
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.adapter_files import make_adapter
from quire import LLM
from quire.bench import startup
from quire.engine.async_llm import AsyncLLM
from quire.entrypoints.cli.main import main
from tests.tiny_models import save_tiny

FEW = ("--max-model-len", "256", "--num-gpu-blocks-override", "128", "--no-probe", "--json", "--repetitions", "2")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny("llama", folder)
    return [str(folder), "--skip-tokenizer-init", "--token-id-limit", "200", "--dtype", "float32", *FEW]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[Any], Any]]:
    """What the engine was asked for: method, prompts and sampling parameters."""
    made: list[tuple[str, list[Any], Any]] = []
    for name in ("generate", "chat", "beam_search"):
        original = getattr(LLM, name)

        def recorded(
            self: LLM, prompts: Any, params: Any, *, own: Any = original, name: str = name, **more: Any
        ) -> Any:
            made.append((name, list(prompts), params))
            return own(self, prompts, params, **more)

        monkeypatch.setattr(LLM, name, recorded)
    return made


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["bench", *words]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("engine", [[], ["--async-engine"]])
def test_throughput_of_an_adapter(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: list[str]
) -> None:
    config = json.loads((Path(tiny[0]) / "config.json").read_text())
    flags = ["--enable-lora", "--max-loras", "2", "--num-prompts", "4", "--random-input-len", "8", *engine]
    flags += ["--random-output-len", "4", "--lora-assignment", "round-robin"]
    adapter = make_adapter(tmp_path, 1, config).lora_path
    assert bench(capsys, "throughput", *tiny, *flags, "--lora-path", adapter)["metrics"]["output"]["median"] > 0
    assert main(["bench", "throughput", *tiny, *flags, "--lora-path", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err


def test_throughput(tiny: list[str], calls: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    flags = ["--num-prompts", "6", "--input-len", "10", "--output-len", "5", "--n", "2", "--prefix-len", "7"]
    report = bench(capsys, "throughput", *tiny, *flags, "--num-warmups", "3", "--output-json", str(file))
    result = json.loads(file.read_text())
    assert (result["num_requests"], result["total_num_tokens"]) == (6, 6 * (17 + 2 * 5))
    assert result["tokens_per_second"] == pytest.approx(result["total_num_tokens"] / result["elapsed_time"])
    assert result["requests_per_second"] == pytest.approx(6 / result["elapsed_time"])
    assert result["tokens_per_second"] in report["metrics"]["prompt_and_output"]["values"]
    assert [len(prompts) for _, prompts, _ in calls] == [3, 6, 6]
    _, prompts, params = calls[1]
    assert len({tuple(prompt[:7]) for prompt in prompts}) == 1 and {len(prompt) for prompt in prompts} == {17}
    assert {(one.n, one.max_tokens, one.detokenize) for one in params} == {(2, 5, False)}


def test_random_lengths_vary(tiny: list[str], calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--num-prompts",
        "8",
        "--random-input-len",
        "20",
        "--random-output-len",
        "4",
        "--random-range-ratio",
        "0.5",
    ]
    bench(capsys, "throughput", *tiny, *flags, "--num-warmups", "0", "--seed", "5")
    (_, prompts, params), (_, others, _) = calls
    assert len({len(prompt) for prompt in prompts}) > 1 and {one.max_tokens for one in params} <= set(range(2, 7))
    assert prompts != others


def test_the_engine_that_servers_use(tiny: list[str], calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-prompts", "4", "--input-len", "10", "--output-len", "5", "--async-engine"]
    report = bench(capsys, "throughput", *tiny, *flags)
    assert len(report["metrics"]["output"]["values"]) == 2 and calls == []


def test_texts_of_a_file(calls: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns = [{"value": "What is the capital of France?"}, {"value": "It is the city of Paris"}]
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps([{"conversations": turns}]))
    flags = ["--dataset-name", "sharegpt", "--dataset-path", str(file), "--num-prompts", "2", "--num-warmups", "0"]
    report = bench(capsys, "throughput", *flags, *FEW, "--backend", "vllm-chat", "--no-disable-detokenize")
    assert report["workload"]["file"] == "sharegpt.json"
    assert [name for name, _, _ in calls] == ["chat", "chat"]
    _, prompts, params = calls[0]
    assert prompts[0][0]["content"] == turns[0]["value"] and len(prompts) == 2
    assert params[0].detokenize and params[0].max_tokens == 6


def test_texts_are_rendered_as_chats(calls: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Hello there", "output_tokens": 3}\n')
    flags = ["--dataset-name", "custom", "--dataset-path", str(file), "--num-prompts", "-1", "--num-warmups", "0"]
    for more, rendered in (([], True), (["--skip-chat-template"], False)):
        bench(capsys, "throughput", *flags, *FEW, *more)
        (prompt,) = calls[-1][1]
        assert (len(prompt) > 10) if rendered else prompt == "Hello there"


def test_latency(tiny: list[str], calls: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    flags = [
        "--input-len",
        "10",
        "--output-len",
        "5",
        "--batch-size",
        "3",
        "--num-iters",
        "4",
        "--num-iters-warmup",
        "2",
    ]
    report = bench(capsys, "latency", *tiny, *flags, "--output-json", str(file))
    result = json.loads(file.read_text())
    assert len(result["latencies"]) == 4 and result["latencies"] == report["metrics"]["latency"]["values"]
    assert result["avg_latency"] == pytest.approx(statistics.mean(result["latencies"]))
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert result["percentiles"]["50"] == pytest.approx(statistics.median(result["latencies"]))
    assert [(name, len(prompts)) for name, prompts, _ in calls] == [("generate", 3)] * (2 + 2 * 4)


def test_beams(tiny: list[str], calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--input-len", "10", "--output-len", "5", "--use-beam-search", "--n", "2", "--num-iters-warmup", "0"]
    bench(capsys, "latency", *tiny, *flags)
    assert [(name, params.beam_width, params.max_tokens) for name, _, params in calls] == [
        ("beam_search", 2, 1),
        ("beam_search", 2, 5),
    ] * 2


def test_a_profiled_batch(
    tiny: list[str], calls: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    marks: list[int] = []
    for name in ("start_profile", "stop_profile"):
        monkeypatch.setattr(LLM, name, lambda self: marks.append(len(calls)), raising=False)
    flags = ["--input-len", "10", "--output-len", "5", "--num-iters-warmup", "1", "--profile"]
    assert main(["bench", "latency", *tiny, *flags]) == 0
    assert marks == [1, 2]


def test_a_profiled_run_of_the_engine_that_servers_use(tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    marks: list[str] = []
    for name in ("start_profile", "stop_profile"):

        async def mark(self: AsyncLLM, name: str = name) -> None:
            marks.append(name)

        monkeypatch.setattr(AsyncLLM, name, mark, raising=False)
    flags = ["--num-prompts", "2", "--input-len", "5", "--output-len", "2", "--num-warmups", "0", "--async-engine"]
    assert main(["bench", "throughput", *tiny, *flags, "--profile"]) == 0
    assert marks == ["start_profile", "stop_profile"] * 2


def test_cold_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their processes have empty caches; the time is that of the load, as in vLLM."""
    caches: list[str | None] = []

    def start(*args: Any, env: dict[str, str] | None, **more: Any) -> SimpleNamespace:
        caches.append(env["XDG_CACHE_HOME"] if env is not None else None)
        load = 5.0 if env is not None else 2.0
        marks = {"interpreter": 100.5, "import": 101.0, "load": 101.0 + load, "first token": 107.0}
        return SimpleNamespace(returncode=0, stdout=json.dumps(marks), stderr="")

    monkeypatch.setattr(startup, "subprocess", SimpleNamespace(run=start))
    monkeypatch.setattr(startup, "time", SimpleNamespace(time=lambda: 100.0))
    file = tmp_path / "result.json"
    flags = ["--num-iters-cold", "2", "--num-iters-warmup", "1", "--num-iters-warm", "3", "--output-json", str(file)]
    report = bench(capsys, "startup", *flags, "--no-probe", "--json")
    assert len(set(caches[:2])) == 2 and None not in caches[:2] and caches[2:] == [None] * 4
    result = json.loads(file.read_text())
    assert result["cold_startup_times"] == report["metrics"]["load_(cold)"]["values"] == [5.0, 5.0]
    assert result["warm_startup_times"] == report["metrics"]["load"]["values"] == [2.0] * 3
    assert (result["avg_cold_startup_time"], result["warm_startup_percentiles"]["99"]) == (5.0, 2.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["throughput", "--backend", "hf"], "'hf' is not available yet: measuring other engines offline"),
        (["throughput", "--backend", "vllm-chat"], "needs texts: --dataset-name sharegpt, sonnet or custom"),
        (["throughput", "--dataset-name", "sharegpt"], "needs a file (--dataset-path)"),
        (["throughput", "--num-prompts", "0"], "--num-prompts is 0"),
        (["throughput", "--lora-path", "somewhere"], "--lora-path needs --enable-lora"),
    ],
)
def test_mistakes_are_explained(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["bench", *words])
    except SystemExit as stopped:
        code = stopped.code  # type: ignore[assignment]
    assert code == 2 and message in capsys.readouterr().err
