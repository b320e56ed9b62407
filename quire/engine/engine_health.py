"""Detects a stalled engine process: alive, but silent or stuck in a step."""

import logging

from quire.engine.async_engine import EngineStalledError

logger = logging.getLogger("quire")

# A longer poll means that this process itself was stopped, not the engine.
MAX_POLL_SECONDS = 1.0


class EngineHealth:
    """Updated by the listener thread; checked from any thread."""

    def __init__(self, heartbeat_timeout: float, stall_timeout: float) -> None:
        """Seconds without a message, and seconds in one step, after which the engine counts as stalled; 0: never."""
        self._heartbeat_timeout = heartbeat_timeout
        self._stall_timeout = stall_timeout
        self._silent = 0.0
        self._step_seconds = 0.0
        self._stalled = False

    def record_message(self, step_seconds: float | None = None) -> None:
        """A message arrived; heartbeats carry the duration of the current step."""
        self._silent = 0.0
        if step_seconds is not None:
            self._step_seconds = step_seconds

    def record_silence(self, seconds: float) -> None:
        """No message for `seconds` more."""
        self._silent += min(seconds, MAX_POLL_SECONDS)

    def check(self) -> None:
        cause = self._cause()
        if cause is None:
            if self._stalled:
                logger.warning("the engine has recovered")
            self._stalled = False
            return
        if not self._stalled:
            logger.error("the engine is stalled: %s", cause)
        self._stalled = True
        raise EngineStalledError(cause)

    def _cause(self) -> str | None:
        if self._heartbeat_timeout and self._silent > self._heartbeat_timeout:
            limit = f"{self._heartbeat_timeout:g} seconds (--engine-heartbeat-timeout)"
            return f"the engine process has sent no heartbeat for more than {limit}"
        if self._stall_timeout and self._step_seconds > self._stall_timeout:
            limit = f"{self._stall_timeout:g} seconds (--engine-stall-timeout)"
            return f"the engine has been in one step for more than {limit}"
        return None
