import numpy as np
import pytest

from quire.config import CacheConfig
from quire.engine import output_processor
from quire.engine.output_processor import OutputProcessor
from quire.messages.requests import (
    EngineCoreOutputs,
    EngineCoreRequest,
    ErrorKind,
    FinishReason,
    RequestError,
    SchedulerStats,
)
from quire.messages.sampling_params import RequestOutputKind, SamplingParams
from quire.metrics.engine import cache_config_info, scheduler_metrics
from quire.metrics.kinds import Counter, Gauge, Histogram, Observations, combined
from tests.core.fake_engine import FakeEngine

LABELS = {"model_name": "m", "engine": "0"}


class Clock:
    """Replaces the module `time`: the test advances the clock."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def time(self):
        return 1_700_000_000.0 + self.now


@pytest.fixture
def clock(monkeypatch):
    one = Clock()
    monkeypatch.setattr(output_processor, "time", one)
    return one


def add(processor, clock, name, indices, **params):
    given = SamplingParams(n=len(indices), **params)
    prompt = np.arange(5, dtype=np.int32)
    request = EngineCoreRequest(name, indices[0], prompt, given, (), 0, clock.time())
    assert [one.index for one in request.sequences()] == indices
    processor.add(name, None, prompt.tolist(), request)


def step(processor, index, finish=FinishReason.NONE, tokens_each=1, scheduled=None, num_cached=0):
    count = len(index)
    outputs, _ = processor.process(
        EngineCoreOutputs(
            index=np.array(index),
            token_ids=np.zeros(count * tokens_each, np.int32),
            offsets=np.arange(count + 1, dtype=np.int32) * tokens_each,
            finish=np.full(count, finish, np.int8),
            num_cached=np.full(count, num_cached, np.int32),
            scheduled=scheduled or {},
        )
    )
    return outputs


def metrics(processor):
    return {
        (m.name.removeprefix("quire:"), *[v for k, v in m.labels.items() if k not in LABELS]): m
        for m in processor.metrics.snapshot(SchedulerStats(), "m")
    }


def seen(histogram):
    """Sum and count."""
    return pytest.approx(histogram.sum, abs=1e-5), histogram.count


def test_a_request_in_its_phases(clock):
    processor = OutputProcessor(None)
    add(processor, clock, "a", [7], max_tokens=50)
    clock.now += 2  # waits two seconds, computes its prompt for one
    scheduled = clock.now
    clock.now += 1
    step(processor, [7], scheduled={0: scheduled}, num_cached=2)
    for gap in (0.1, 0.1, 0.3):
        clock.now += gap
        (output,) = step(processor, [7])
    clock.now += 0.5
    (output,) = step(processor, [7], FinishReason.LENGTH)

    got = metrics(processor)
    for name, total in {
        "time_to_first_token_seconds": 3,
        "request_queue_time_seconds": 2,
        "request_prefill_time_seconds": 1,
        "request_decode_time_seconds": 1,
        "request_inference_time_seconds": 2,
        "e2e_request_latency_seconds": 4,
        "request_time_per_output_token_seconds": 0.25,
        "request_prompt_tokens": 5,
        "request_prefill_kv_computed_tokens": 3,
        "request_generation_tokens": 5,
        "request_max_num_generation_tokens": 5,
        "request_params_max_tokens": 50,
        "request_params_n": 1,
    }.items():
        assert seen(got[name,]) == (total, 1), name
    between = got["inter_token_latency_seconds",]
    assert seen(between) == (1.0, 4)
    assert (between.buckets["0.075"], between.buckets["0.15"], between.buckets["0.3"]) == (0, 2, 3)
    assert got["prompt_tokens",].value == 5 and got["prompt_tokens_cached",].value == 2
    assert got["generation_tokens",].value == 5
    assert got["request_success", "length"].value == 1 and got["request_success", "stop"].value == 0

    times = output.metrics
    assert times.arrival_time == 1_700_001_000.0 and times.finished_time == pytest.approx(1_700_001_004.0)
    assert times.time_in_queue == pytest.approx(2) and times.time_to_first_token == pytest.approx(3)
    assert times.num_generation_tokens == 5


def test_completions_of_one_request(clock):
    processor = OutputProcessor(None)
    add(processor, clock, "a", [1, 2], max_tokens=None)
    clock.now += 1
    step(processor, [1], scheduled={0: clock.now - 0.5})
    clock.now += 1
    step(processor, [1, 2], scheduled={1: clock.now - 0.5})
    clock.now += 1
    step(processor, [1, 2])
    clock.now += 1
    step(processor, [1], FinishReason.STOP)
    step(processor, [2], FinishReason.STOP)
    got = metrics(processor)
    assert seen(got["time_to_first_token_seconds",]) == (1, 1)  # of the request: the first of any
    assert seen(got["request_queue_time_seconds",]) == (0.5, 1)
    assert seen(got["inter_token_latency_seconds",]) == (5, 5)
    assert seen(got["request_generation_tokens",]) == (7, 1)
    assert seen(got["request_max_num_generation_tokens",]) == (4, 1)
    assert got["request_params_max_tokens",].count == 0
    assert got["prompt_tokens",].value == 5
    assert got["request_success", "stop"].value == 2


def test_several_tokens_at_once_are_one_interval(clock):
    processor = OutputProcessor(None)
    add(processor, clock, "a", [1], max_tokens=100)
    step(processor, [1])
    clock.now += 0.2
    step(processor, [1], tokens_each=4)
    assert seen(metrics(processor)["inter_token_latency_seconds",]) == (0.2, 1)


def test_what_ends_without_a_token_has_no_phases(clock):
    processor = OutputProcessor(None)
    add(processor, clock, "a", [1])
    add(processor, clock, "b", [2])
    clock.now += 1
    step(processor, [1], FinishReason.ERROR, tokens_each=0)
    processor.drop(["b"])
    got = metrics(processor)
    assert got["request_success", "error"].value == 1 and got["request_success", "abort"].value == 1
    assert seen(got["e2e_request_latency_seconds",]) == (1, 1)
    empty = ("time_to_first_token", "request_queue_time", "request_prefill_time", "request_decode_time")
    assert all(got[f"{name}_seconds",].count == 0 for name in empty)


def test_requests_whose_logits_are_not_numbers(clock):
    processor = OutputProcessor(None)
    for index, kind in enumerate((ErrorKind.NOT_A_NUMBER, ErrorKind.INTERNAL)):
        add(processor, clock, str(index), [index])
        processor.process(EngineCoreOutputs.ended([index], FinishReason.ERROR, RequestError(kind, "x")))
    assert metrics(processor)["corrupted_requests",].value == 1


def test_an_aborted_request_reports_its_progress(clock):
    processor = OutputProcessor(None)
    add(processor, clock, "a", [1], output_kind=RequestOutputKind.DELTA)
    clock.now += 1
    step(processor, [1])
    clock.now += 1
    times = processor.aborted("a").metrics
    assert times.num_generation_tokens == 1 and times.finished_time == pytest.approx(1_700_001_002.0)


def test_histograms_count_from_below():
    observations = Observations((1, 2.5))
    for value in (0.5, 1, 2, 3):
        observations.add(value)
    observations.add(2, times=3)
    assert observations.histogram("x", {}) == Histogram("x", {}, 7, 12.5, {"1.0": 2, "2.5": 6, "+Inf": 7})


def test_reports_of_several_front_ends():
    old, new = SchedulerStats(time=1, num_running=9, num_preemptions=1), SchedulerStats(time=2, num_preemptions=3)
    own = [Counter("c", LABELS, 2), Gauge("g", {}, 1), Histogram("h", {}, 1, 0.5, {"1.0": 1, "+Inf": 1})]
    other = [
        Counter("c", LABELS, 3),
        Counter("c", {"model_name": "n"}, 4),
        Histogram("h", {}, 2, 3.0, {"1.0": 0, "+Inf": 2}),
    ]
    got = combined([[*scheduler_metrics(new, LABELS), *own], [*scheduler_metrics(old, LABELS), *other]])
    assert got[: len(scheduler_metrics(new, LABELS))] == scheduler_metrics(new, LABELS)
    assert got[len(scheduler_metrics(new, LABELS)) :] == [
        Counter("c", LABELS, 5),
        Gauge("g", {}, 1),
        Histogram("h", {}, 3, 3.5, {"1.0": 1, "+Inf": 3}),
        Counter("c", {"model_name": "n"}, 4),
    ]


def test_cache_config_is_in_labels():
    info = cache_config_info(CacheConfig(block_size=32), 77, "m", 616)
    assert info.value == 1
    assert info.labels["block_size"] == "32" and info.labels["num_gpu_blocks"] == "77"
    assert info.labels["enable_prefix_caching"] == "True"


def test_gauges_and_counters_are_the_schedulers():
    engine = FakeEngine(num_blocks=8, max_num_seqs=1)
    engine.add("a", range(16), max_tokens=4)
    engine.add("b", range(16), max_tokens=4)
    engine.step()

    def values():
        return {m.name: m.value for m in scheduler_metrics(engine.scheduler.stats(), LABELS) if hasattr(m, "value")}

    found = values()
    assert found["quire:num_requests_running"] == 1 and found["quire:num_requests_waiting"] == 1
    assert found["quire:kv_cache_usage_perc"] == 4 / 8
    assert found["quire:prefix_cache_queries"] == 16 and found["quire:prefix_cache_hits"] == 0
    engine.run()
    found = values()
    assert found["quire:num_requests_waiting"] == 0 and found["quire:kv_cache_usage_perc"] == 0
    assert found["quire:prefix_cache_queries"] == 32 and found["quire:prefix_cache_hits"] == 12
