"""Computes throughput, latencies, goodput and errors from request records.

Definitions follow vLLM: time per output token excludes the first, inter-token latency is the gap between two events
with tokens (an event with several is one gap), and a request ends with its last token.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.bench.report import Metric
from quire.bench.serve_client import Record, Run
from quire.config.flags import number

NAMES = {"ttft": "time to first token", "tpot": "time per output token", "itl": "inter-token", "e2el": "end to end"}
Goodput = dict[str, float]  # limit in milliseconds, by latency


@dataclass
class Stats:
    """One run. Latencies are in milliseconds: one value per request, except `itl` with one per gap."""

    duration: float
    completed: list[Record]
    errors: dict[str, int]
    latencies: dict[str, np.ndarray]
    peak_concurrency: int
    good: int | None  # requests within the goodput limits, if given

    @property
    def output_tokens(self) -> int:
        return sum(record.output_tokens for record in self.completed)

    @property
    def prompt_tokens(self) -> int:
        return sum(record.prompt_tokens for record in self.completed)

    def details(self) -> dict[str, Any]:
        lags = [1e3 * (record.sent - record.due) for record in self.completed if record.due is not None]
        return {
            "duration_s": self.duration,
            "completed": len(self.completed),
            "failed": sum(self.errors.values()),
            "errors": self.errors,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "events": sum(len(record.events) for record in self.completed),
            "tokens_counted_by": sorted({record.counted_by for record in self.completed}),
            "peak_concurrency": self.peak_concurrency,
            "sent_late_ms_p99": float(np.percentile(lags, 99)) if lags else None,
        }


def summarize(run: Run, goodput: Goodput | None = None) -> Stats:
    completed = [record for record in run.records if record.error is None]
    errors = dict(Counter(record.error for record in run.records if record.error is not None).most_common())
    of_requests = [latencies_of(record) for record in completed]
    latencies = {
        name: np.array([found[name] for found in of_requests if name in found], np.float64)
        for name in ("ttft", "tpot", "e2el")
    }
    gaps = [np.diff(record.events) for record in completed if len(record.events) > 1]
    latencies["itl"] = 1e3 * np.concatenate(gaps) if gaps else np.array([], np.float64)
    good = None
    if goodput:
        good = sum(all(found.get(name, 0.0) <= limit for name, limit in goodput.items()) for found in of_requests)
    ended = max((record.ended for record in run.records), default=run.start)
    return Stats(ended - run.start, completed, errors, latencies, peak_concurrency(run.records), good)


def latencies_of(record: Record) -> dict[str, float]:
    """In milliseconds; latencies that need more tokens than the request has are left out."""
    if not record.events:
        return {}
    first, last = record.events[0], record.events[-1]
    found = {"ttft": 1e3 * (first - record.sent), "e2el": 1e3 * (last - record.sent)}
    if record.output_tokens > 1:
        found["tpot"] = 1e3 * (last - first) / (record.output_tokens - 1)
    return found


def peak_concurrency(records: Sequence[Record]) -> int:
    changes = sorted([(record.sent, 1) for record in records] + [(record.ended, -1) for record in records])
    return int(np.cumsum([change for _, change in changes]).max(initial=0))


def metrics(runs: Sequence[Stats], shown: Sequence[str], percentiles: Sequence[float]) -> list[Metric]:
    """Metrics with one value per run."""
    rates = {
        "requests": ("/s", [len(run.completed) / run.duration for run in runs]),
        "output": ("tok/s", [run.output_tokens / run.duration for run in runs]),
        "prompt and output": ("tok/s", [(run.prompt_tokens + run.output_tokens) / run.duration for run in runs]),
    }
    good = [run.good / run.duration for run in runs if run.good is not None]
    if good:
        rates["goodput"] = ("/s", good)
    result = [Metric(name, unit, values) for name, (unit, values) in rates.items()]
    for name in shown:
        measured = [run.latencies[name] for run in runs if len(run.latencies[name])]
        if not measured:
            continue
        columns = {"mean": [float(values.mean()) for values in measured]}
        for percentile in percentiles:
            columns[f"p{percentile:g}"] = [float(np.percentile(values, percentile)) for values in measured]
        result += [Metric(f"{name} {column}", "ms", values, lower_is_better=True) for column, values in columns.items()]
    return result


def latency_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not a latency; allowed: {', '.join(NAMES)}")
    return names


def percentile_list(text: str) -> list[float]:
    found = [number(part) for part in text.split(",") if part.strip()]
    if any(not 0 <= one <= 100 for one in found):
        raise argparse.ArgumentTypeError(f"{text!r}: percentiles are between 0 and 100")
    return found


def goodput_limits(text: str) -> Goodput:
    """`ttft:200,tpot:50`"""
    limits: Goodput = {}
    for part in filter(None, text.split(",")):
        name, _, limit = part.partition(":")
        if name not in ("ttft", "tpot", "e2el"):
            raise argparse.ArgumentTypeError(f"{part!r}: write ttft:MS, tpot:MS or e2el:MS, separated by commas")
        limits[name] = number(limit)
    return limits
