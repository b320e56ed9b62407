"""Rate limits with a fake clock."""

import pytest

from quire.entrypoints.http.rate_limit import FixedWindowLimiter


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_requests_are_refilled_when_the_interval_is_over(clock: Clock) -> None:
    windows = FixedWindowLimiter(60, requests=2, tokens=None, clock=clock)
    assert windows.acquire_now(b"a", 2) is None
    clock.now += 59
    refusal = windows.acquire_now(b"a")
    assert refusal is not None and refusal.seconds_left == 1
    clock.now += 1
    assert windows.acquire_now(b"a", 2) is None
    assert windows.acquire_now(b"a") is not None


def test_tokens_are_refilled_when_the_interval_is_over(clock: Clock) -> None:
    windows = FixedWindowLimiter(60, requests=None, tokens=10, clock=clock)
    windows.charge(b"a", 9)
    assert windows.acquire_now(b"a") is None
    windows.charge(b"a", 1)
    assert windows.acquire_now(b"a") is not None
    assert windows.acquire_now(b"b") is None  # another client
    clock.now += 60
    assert windows.acquire_now(b"a") is None


def test_a_request_beyond_the_limit_is_refused_and_not_charged(clock: Clock) -> None:
    windows = FixedWindowLimiter(60, requests=3, tokens=None, clock=clock)
    assert windows.acquire_now(b"a", 2) is None
    assert windows.acquire_now(b"a", 2) is not None
    assert windows.acquire_now(b"a", 1) is None
