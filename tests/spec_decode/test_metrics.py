"""What is counted of drafts: by the engine, by its log line, and for a request."""

from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.messages.requests import EngineCoreOutputs, FinishReason, SchedulerStats
from quire.messages.speculation import DraftStats
from quire.metrics.engine import scheduler_metrics
from quire.metrics.kinds import Counter, Vector, with_vectors
from quire.metrics.spec_decode import SpecDecodeMetrics
from quire.metrics.stats_logger import StatsLogger
from tests.core.fake_engine import FakeEngine
from tests.spec_decode import proposers
from tests.tiny_models import save_tiny

PROMPT = {"prompt_token_ids": [5, 6, 7]}
PARAMS = SamplingParams(temperature=0, max_tokens=21, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    model = tmp_path_factory.mktemp("model")
    save_tiny("llama", model)
    return str(model)


def engine(model: str, method: str | None = None, **options: Any) -> LLM:
    if method is not None:
        options |= {"spec_method": f"tests.spec_decode.proposers:{method}", "spec_tokens": 4, "spec_adaptive": False}
    return LLM(model, skip_tokenizer_init=True, max_model_len=128, dtype="float32", **options)


def test_figures_of_a_request(tiny: str) -> None:
    with engine(tiny, per_request_spec_decode_metrics="summary") as llm:
        (plain,) = llm.generate(PROMPT, PARAMS, use_tqdm=False)
    assert plain.outputs[0].spec_decode_metrics is None, "there are no drafts"
    proposers.KNOWN[:] = [[*PROMPT["prompt_token_ids"], *plain.outputs[0].token_ids]]
    try:
        with engine(tiny, "Right", per_request_spec_decode_metrics="detailed", async_scheduling=False) as llm:
            (output,) = llm.generate(PROMPT, PARAMS, use_tqdm=False)
            metrics = {metric.name: metric for metric in llm.get_metrics()}
    finally:
        proposers.KNOWN.clear()
    found = output.outputs[0].spec_decode_metrics
    # The first token comes with the prompt, the other twenty from steps of five.
    assert found.to_dict() == {
        "mean_acceptance_length": 5.0,
        "draft_acceptance_rate": 1.0,
        "acceptance_histogram": [0, 0, 0, 0, 4],
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 16,
        "num_draft_tokens": 16,
        "num_spec_tokens": 4,
        "per_step_accepted": [4, 4, 4, 4],
        "per_step_drafted": [4, 4, 4, 4],
    }
    counted = [metrics[f"quire:spec_decode_num_{name}"] for name in ("drafts", "draft_tokens", "accepted_tokens")]
    assert [one.value for one in counted if isinstance(one, Counter)] == [4, 16, 16]
    by_position = metrics["quire:spec_decode_num_accepted_tokens_per_pos"]
    assert isinstance(by_position, Vector) and by_position.values == [4, 4, 4, 4]


def test_nothing_is_counted_unless_asked_for(tiny: str) -> None:
    with engine(tiny, "Fixed") as llm:
        assert llm.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0].spec_decode_metrics is None
        assert any(metric.name == "quire:spec_decode_num_drafts" for metric in llm.get_metrics())
    with engine(tiny) as llm:
        assert not any("spec_decode" in metric.name for metric in llm.get_metrics())


def test_the_worked_example_of_acceptance() -> None:
    """Of two steps with 3 and 2 drafts, 2 and 0 are accepted."""
    found = SpecDecodeMetrics(3)
    found.add(3, 3)
    found.add(2, 1)
    assert (found.mean_acceptance_length, found.draft_acceptance_rate) == (2.0, 0.4)
    assert found.to_dict()["per_step_accepted"] is None


def test_counters_with_a_label_by_position() -> None:
    stats = SchedulerStats(drafts=DraftStats(12, (1, 1, 0, 2)))
    named = [metric for metric in scheduler_metrics(stats, {"engine": "0"}) if "spec_decode" in metric.name]
    assert [metric.value for metric in named if isinstance(metric, Counter)] == [4, 12, 7, 3, 2, 2]
    assert [metric.labels.get("position") for metric in named] == [None, None, None, "0", "1", "2"]
    *_, vector = with_vectors(named)
    assert isinstance(vector, Vector) and vector.values == [3, 2, 2] and vector.labels == {"engine": "0"}


def test_the_log_line() -> None:
    run = FakeEngine(num_drafts=3, proposer="right")
    now = [10.0]
    log = StatsLogger(run.scheduler, clock=lambda: now[0])
    run.add("a", range(5), max_tokens=9)
    run.run()
    now[0] += 2
    first, second = (log.report() or "").splitlines()
    assert first.startswith("Avg prompt throughput")
    assert second == (
        "SpecDecoding metrics: Mean acceptance length: 4.00, Accepted throughput: 3.00 tokens/s, Drafted throughput: "
        "3.00 tokens/s, Accepted: 6 tokens, Drafted: 6 tokens, Per-position acceptance rate: 1.000, 1.000, 1.000, "
        "Avg Draft acceptance rate: 100.0%"
    )
    assert "SpecDecoding" not in (log.report() or "")


def test_a_part_of_the_outputs_has_its_own_drafts() -> None:
    outputs = EngineCoreOutputs(
        index=np.array([1, 5]),
        token_ids=np.arange(3, dtype=np.int32),
        offsets=np.array([0, 2, 3], np.int32),
        finish=np.full(2, FinishReason.NONE, np.int8),
        num_cached=np.zeros(2, np.int32),
        num_drafts=np.array([3, 2], np.int32),
    )
    part = outputs.select(4, 6)
    assert part.num_drafts is not None and part.num_drafts.tolist() == [2]
