import logging
import threading

from quire.metrics.stats_logger import StatsLogger
from tests.core.fake_engine import FakeEngine


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_lines_while_something_happens_and_one_after():
    engine, clock = FakeEngine(), Clock()
    stats = StatsLogger(engine.scheduler, clock=clock)
    assert stats.report() is None

    engine.add("a", range(20), max_tokens=30)
    for _ in range(5):
        engine.step()
    engine.add("b", range(20), max_tokens=30)
    engine.step()
    clock.now += 10
    report = stats.report()
    assert report is not None
    assert "Avg prompt throughput: 4.0 tokens/s, Avg generation throughput: 0.7 tokens/s" in report
    assert "Running: 2 reqs, Waiting: 0 reqs" in report
    assert "Prefix cache hit rate: 40.0%" in report  # b found 16 of its 20 tokens, a none

    engine.run()
    clock.now += 10
    assert "generation throughput: 5.3 tokens/s, Running: 0 reqs" in (stats.report() or "")
    clock.now += 10
    assert "generation throughput: 0.0 tokens/s, Running: 0 reqs" in (stats.report() or "")
    clock.now += 10
    assert stats.report() is None


def test_waiting_is_something():
    engine = FakeEngine()
    stats = StatsLogger(engine.scheduler, clock=Clock())
    engine.add("a", range(20))
    assert "Running: 0 reqs, Waiting: 1 reqs" in (stats.report() or "")


def test_the_thread_logs():
    engine, seen = FakeEngine(), threading.Event()
    lines = []

    class Handler(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())
            seen.set()

    logger, handler = logging.getLogger("quire"), Handler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        engine.add("a", range(20))
        stats = StatsLogger(engine.scheduler, interval=0.001)
        stats.start()
        assert seen.wait(20)
        stats.stop()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert "Waiting: 1 reqs" in lines[0]
