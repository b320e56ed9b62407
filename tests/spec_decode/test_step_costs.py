"""Timing steps at start-up: which are run, and that it ends."""

from collections.abc import Callable

import pytest

from quire.messages.plan import SchedulerOutput
from quire.spec_decode import step_costs
from quire.spec_decode.step_costs import measure_step_costs


class Clock:
    """Replaces the module `time`: a step takes as long as `cost` says."""

    def __init__(self, cost: Callable[[int], float]) -> None:
        self.cost, self.now = cost, 0.0
        self.plans: list[SchedulerOutput] = []

    def perf_counter(self) -> float:
        return self.now

    def submit(self, plan: SchedulerOutput) -> Callable[[], object]:
        self.plans.append(plan)
        self.now += self.cost(plan.total_tokens)
        return lambda: None


def test_steps_of_all_sizes_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(lambda tokens: 0.001 + 1e-6 * tokens)
    monkeypatch.setattr(step_costs, "time", clock)
    plain, drafted = measure_step_costs(clock.submit, 64, 2, 4, 2048)
    assert [tokens for tokens, _ in plain] == [1, 4, 16, 64]
    assert [tokens for tokens, _ in drafted] == [2, 5, 20, 80, 320]
    assert all(seconds == pytest.approx(0.001 + 1e-6 * tokens) for tokens, seconds in (*plain, *drafted))
    first, *_, last = clock.plans
    assert [new.row for new in first.new_rows] == last.finished_rows == list(range(64))
    assert first.new_rows[0].block_ids == [[0], [0]]


def test_slow_steps_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(lambda tokens: 0.3 if tokens else 0.0)
    monkeypatch.setattr(step_costs, "time", clock)
    plain, drafted = measure_step_costs(clock.submit, 64, 1, 4, 2048)
    assert ([tokens for tokens, _ in plain], [tokens for tokens, _ in drafted]) == ([1], [2, 5])


def test_a_disturbed_run_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    disturbed = iter([0.0, 0.05, *[0.001] * 1000])
    clock = Clock(lambda tokens: next(disturbed))
    monkeypatch.setattr(step_costs, "time", clock)
    plain, drafted = measure_step_costs(clock.submit, 1, 1, 2, 64)
    assert [seconds for _, seconds in (*plain, *drafted)] == pytest.approx([0.001] * 3)


def test_ranks_run_the_same_steps_however_long_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for seconds in (0.0001, 1.0):
        clock = Clock(lambda tokens, seconds=seconds: seconds)
        monkeypatch.setattr(step_costs, "time", clock)
        measure_step_costs(clock.submit, 16, 1, 2, 256, in_step=True)
        counts.append([plan.total_tokens for plan in clock.plans])
    assert counts[0] == counts[1]
