"""Counters and times of an engine, named like vLLM's with the prefix `quire:`."""

import bisect
from collections import Counter as Tally
from dataclasses import dataclass, field

from quire.engine.outputs import RequestMetrics
from quire.messages.requests import SchedulerStats

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)


@dataclass(frozen=True)
class Metric:
    name: str
    labels: dict[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    value: int


@dataclass(frozen=True)
class Gauge(Metric):
    value: float


@dataclass(frozen=True)
class Histogram(Metric):
    count: int
    sum: float
    buckets: dict[str, int]  # upper bound -> observations at or below it


@dataclass(slots=True)
class Observations:
    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    sum: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(SECONDS, seconds)] += 1
        self.sum += seconds

    def histogram(self, name: str, labels: dict[str, str]) -> Histogram:
        buckets, total = {}, 0
        for bound, count in zip([*map(str, SECONDS), "+Inf"], self.counts, strict=True):
            total += count
            buckets[bound] = total
        return Histogram(name, labels, total, self.sum, buckets)


class EngineMetrics:
    """What the front end sees; the scheduler's numbers come with every step."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finish_reasons: Tally[str] = Tally()
        self.time_to_first_token = Observations()
        self.time_per_output_token = Observations()
        self.request_latency = Observations()

    def added(self, num_prompt_tokens: int) -> None:
        self.prompt_tokens += num_prompt_tokens

    def generated(self, count: int) -> None:
        self.generation_tokens += count

    def first_token(self, seconds: float) -> None:
        self.time_to_first_token.add(seconds)

    def finished(self, reason: str) -> None:
        self.finish_reasons[reason] += 1

    def ended(self, times: RequestMetrics, num_tokens: int) -> None:
        assert times.finished_time is not None
        self.request_latency.add(times.finished_time - times.arrival_time)
        if times.first_token_time is not None and num_tokens > 1:
            self.time_per_output_token.add((times.finished_time - times.first_token_time) / (num_tokens - 1))

    def snapshot(self, stats: SchedulerStats, model_name: str) -> list[Metric]:
        labels = {"model_name": model_name}
        return [
            Gauge("quire:num_requests_running", labels, stats.num_running),
            Gauge("quire:num_requests_waiting", labels, stats.num_waiting),
            Gauge("quire:kv_cache_usage_perc", labels, stats.kv_cache_usage),
            Counter("quire:num_preemptions", labels, stats.num_preemptions),
            Counter("quire:prefix_cache_queries", labels, stats.prefix_cache_queries),
            Counter("quire:prefix_cache_hits", labels, stats.prefix_cache_hits),
            Counter("quire:prompt_tokens", labels, self.prompt_tokens),
            Counter("quire:generation_tokens", labels, self.generation_tokens),
            *(
                Counter("quire:request_success", {**labels, "finished_reason": reason}, count)
                for reason, count in sorted(self.finish_reasons.items())
            ),
            self.time_to_first_token.histogram("quire:time_to_first_token_seconds", labels),
            self.time_per_output_token.histogram("quire:time_per_output_token_seconds", labels),
            self.request_latency.histogram("quire:e2e_request_latency_seconds", labels),
        ]
