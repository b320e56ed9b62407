"""Kinds of metrics, as a reader gets them, and their sums over the front ends of an engine."""

import bisect
import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Metric:
    name: str
    labels: dict[str, str]
    # Set for engine-wide values: every front end reports the same one, and the newest is valid.
    as_of: float | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Counter(Metric):
    value: float


@dataclass(frozen=True)
class Vector(Metric):
    """Several counters: of drafts accepted by position."""

    values: list[int]


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
    """A mutable histogram."""

    bounds: Sequence[float]
    counts: list[int] = field(init=False)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def histogram(self, name: str, labels: dict[str, str]) -> Histogram:
        return histogram(name, labels, self.bounds, self.counts, self.sum)


def histogram(
    name: str,
    labels: dict[str, str],
    bounds: Sequence[float],
    counts: Sequence[int],
    sum: float,
    as_of: float | None = None,
) -> Histogram:
    buckets, total = {}, 0
    for bound, count in zip([*(repr(float(bound)) for bound in bounds), "+Inf"], counts, strict=True):
        total += count
        buckets[bound] = total
    return Histogram(name, labels, total, sum, buckets, as_of=as_of)


def combined(reports: Iterable[Iterable[Metric]]) -> list[Metric]:
    """Merge the reports of one engine's front ends: their own values are summed, engine-wide ones counted once."""
    found: dict[tuple[str, ...], Metric] = {}
    for metric in (metric for report in reports for metric in report):
        key = (metric.name, *(text for pair in sorted(metric.labels.items()) for text in pair))
        found[key] = _merged(found[key], metric) if key in found else metric
    return list(found.values())


def with_vectors(metrics: Iterable[Metric]) -> list[Metric]:
    """Counters that differ in the label `position` alone, which come in its order, as one Vector."""
    found: list[Metric] = []
    for metric in metrics:
        if not isinstance(metric, Counter) or "position" not in metric.labels:
            found.append(metric)
            continue
        labels = {name: value for name, value in metric.labels.items() if name != "position"}
        last = found[-1] if found else None
        if not isinstance(last, Vector) or (last.name, last.labels) != (metric.name, labels):
            last = Vector(metric.name, labels, [], as_of=metric.as_of)
            found.append(last)
        last.values.append(int(metric.value))
    return found


def _merged(a: Metric, b: Metric) -> Metric:
    if a.as_of is not None and b.as_of is not None:
        return a if a.as_of >= b.as_of else b
    if isinstance(a, Histogram) and isinstance(b, Histogram):
        buckets = {bound: count + b.buckets[bound] for bound, count in a.buckets.items()}
        return dataclasses.replace(a, count=a.count + b.count, sum=a.sum + b.sum, buckets=buckets)
    if isinstance(a, Counter) and isinstance(b, Counter):
        return dataclasses.replace(a, value=a.value + b.value)
    if not isinstance(a, Gauge) or not isinstance(b, Gauge):
        raise ValueError(f"{a.name} has two kinds: {type(a).__name__} and {type(b).__name__}")
    return dataclasses.replace(a, value=a.value + b.value)
