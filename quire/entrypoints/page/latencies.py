"""Percentiles of the last minute, from the histograms that /metrics has anyway."""

import itertools
from collections import deque
from collections.abc import Iterable, Sequence

from quire.metrics.kinds import Histogram, Metric

SHOWN = {
    "first_token": "time_to_first_token_seconds",
    "between_tokens": "inter_token_latency_seconds",
    "queue": "request_queue_time_seconds",
    "whole": "e2e_request_latency_seconds",
}
PERCENTILES = (0.5, 0.9, 0.99)


class Latencies:
    """Compares the newest report with one that is about `seconds` old."""

    def __init__(self, seconds: float = 60.0) -> None:
        self._seconds = seconds
        self._reports: deque[tuple[float, dict[str, list[int]]]] = deque()

    def percentiles(self, now: float, metrics: Iterable[Metric]) -> dict[str, list[float | None]]:
        """For each of SHOWN its PERCENTILES in seconds, None without an observation, and how many there were."""
        found = {metric.name.rpartition(":")[2]: metric for metric in metrics if isinstance(metric, Histogram)}
        histograms = {short: found[name] for short, name in SHOWN.items() if name in found}
        newest = {short: list(histogram.buckets.values()) for short, histogram in histograms.items()}
        self._reports.append((now, newest))
        while now - self._reports[0][0] > self._seconds:
            self._reports.popleft()
        oldest = self._reports[0][1]
        shown: dict[str, list[float | None]] = {}
        for short, histogram in histograms.items():
            before = oldest.get(short) or [0] * len(newest[short])
            counts = [new - old for new, old in zip(newest[short], before, strict=True)]
            bounds = [float(bound) for bound in histogram.buckets]
            shown[short] = [*(quantile(bounds, counts, part) for part in PERCENTILES), counts[-1] if counts else 0]
        return shown


def quantile(bounds: Sequence[float], cumulative: Sequence[int], part: float) -> float | None:
    """By linear interpolation in the bucket where it lies; the last, unbounded one counts as its lower bound."""
    total = cumulative[-1] if cumulative else 0
    if not total:
        return None
    rank, lower, below = part * total, 0.0, 0
    for bound, count in zip(bounds, cumulative, strict=True):
        if count >= rank and count > below:
            return lower if bound == float("inf") else lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    return next(bound for bound, count in itertools.zip_longest(bounds, cumulative) if count == total)
