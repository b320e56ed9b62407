"""When a live engine counts as stalled."""

import pytest

from quire.engine.async_engine import EngineStalledError
from quire.engine.engine_health import EngineHealth


def test_silence(caplog: pytest.LogCaptureFixture) -> None:
    health = EngineHealth(heartbeat_timeout=2, stall_timeout=0)
    for _ in range(10):
        health.record_silence(0.2)
    health.check()
    health.record_silence(0.2)
    for _ in range(2):
        with pytest.raises(EngineStalledError, match=r"more than 2 seconds \(--engine-heartbeat-timeout\)"):
            health.check()
    health.record_message()
    health.check()
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]  # once at each change


def test_a_front_end_that_was_stopped_itself_does_not_blame_the_engine() -> None:
    health = EngineHealth(heartbeat_timeout=2, stall_timeout=0)
    health.record_silence(3600)
    health.check()


def test_one_step() -> None:
    health = EngineHealth(heartbeat_timeout=0, stall_timeout=300)
    health.record_message(299)
    health.check()
    health.record_message(301)
    with pytest.raises(EngineStalledError, match=r"in one step .* 300 seconds \(--engine-stall-timeout\)"):
        health.check()
    health.record_message()  # outputs do not carry it
    with pytest.raises(EngineStalledError):
        health.check()
    health.record_message(0)
    health.check()


def test_both_can_be_switched_off() -> None:
    health = EngineHealth(heartbeat_timeout=0, stall_timeout=0)
    health.record_message(1e9)
    for _ in range(1000):
        health.record_silence(1)
    health.check()
