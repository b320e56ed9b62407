import os
import signal

from quire.config import EngineConfig
from quire.core.engine_start import EngineStart


def test_an_engine_that_is_not_needed_after_all_is_gone():
    start = EngineStart(EngineConfig.from_kwargs())
    assert start.process.is_alive()
    start.cancel()
    assert start.process.exitcode == -signal.SIGKILL
    start.cancel()


def test_a_process_that_has_ended_is_left_to_those_who_wait_for_it():
    start = EngineStart(EngineConfig.from_kwargs())
    os.kill(start.process.pid, signal.SIGKILL)
    start.process.join()
    start.proceed(EngineConfig.from_kwargs(), "ipc:///nowhere", 30)
