"""Logs load and throughput every few seconds while requests run.

In the process of the scheduler: one log line for an engine, however many front ends it has.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from quire.messages.requests import SchedulerStats
from quire.messages.speculation import DraftStats

logger = logging.getLogger("quire")

INTERVAL = 10.0  # seconds


@dataclass(frozen=True)
class Totals:
    """Since the engine's start."""

    time: float
    prompt_tokens: int
    generated_tokens: int
    prefix_queries: int
    prefix_hits: int
    drafts: DraftStats


class Results(Protocol):
    num_prompt_tokens: int
    num_generated_tokens: int


class CountingScheduler(Protocol):
    """What of core/scheduler.py is read here."""

    @property
    def results(self) -> Results: ...

    def stats(self) -> SchedulerStats: ...


class StatsLogger:
    """A thread that reads the scheduler's stats every `interval` seconds: steps pay nothing for it."""

    def __init__(
        self,
        scheduler: CountingScheduler,
        interval: float = INTERVAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._interval = interval
        self._clock = clock
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="quire-stats", daemon=True)
        self._before = self._totals()
        self._hit_rate = 0.0
        self._was_active = False

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            report = self.report()
            if report is not None:
                for line in report.splitlines():
                    logger.info(line)

    def report(self) -> str | None:
        """Load and throughput since the last call; None while idle, but for the first idle interval after work."""
        stats, now, before = self._scheduler.stats(), self._totals(), self._before
        self._before = now
        prompt, generated = now.prompt_tokens - before.prompt_tokens, now.generated_tokens - before.generated_tokens
        active = bool(prompt or generated or stats.num_running or stats.num_waiting)
        reported, self._was_active = active or self._was_active, active
        if not reported:
            return None
        queries = now.prefix_queries - before.prefix_queries
        if queries:
            self._hit_rate = (now.prefix_hits - before.prefix_hits) / queries
        seconds = max(now.time - before.time, 1e-9)
        return (
            f"Avg prompt throughput: {prompt / seconds:.1f} tokens/s, "
            f"Avg generation throughput: {generated / seconds:.1f} tokens/s, "
            f"Running: {stats.num_running} reqs, Waiting: {stats.num_waiting} reqs, "
            f"KV cache usage: {100 * stats.kv_cache_usage:.1f}%, Prefix cache hit rate: {100 * self._hit_rate:.1f}%"
            f"{now.drafts.since(before.drafts).describe(seconds)}"
        )

    def _totals(self) -> Totals:
        results, stats = self._scheduler.results, self._scheduler.stats()
        return Totals(
            self._clock(),
            results.num_prompt_tokens,
            results.num_generated_tokens,
            stats.prefix_cache_queries,
            stats.prefix_cache_hits,
            stats.drafts or DraftStats(0, ()),
        )
