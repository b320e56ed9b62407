"""Whether an engine process that has not ended is still at work."""

import logging

from quire.engine.async_engine import EngineStalledError

logger = logging.getLogger("quire")

# A wait that took longer than this was no wait for the engine: this process itself was stopped.
LONGEST_WAIT = 1.0


class EngineHealth:
    """The thread that listens notes what it hears; anyone may check."""

    def __init__(self, heartbeat_timeout: float, stall_timeout: float) -> None:
        """Seconds of silence, and of one step, after which the engine counts as stalled; 0: never."""
        self._heartbeat_timeout = heartbeat_timeout
        self._stall_timeout = stall_timeout
        self._silent = 0.0
        self._step_seconds = 0.0
        self._stalled = False

    def heard(self, step_seconds: float | None = None) -> None:
        """A message came; a heartbeat says how long the engine's loop has been at one step."""
        self._silent = 0.0
        if step_seconds is not None:
            self._step_seconds = step_seconds

    def silent_for(self, seconds: float) -> None:
        """So much longer."""
        self._silent += min(seconds, LONGEST_WAIT)

    def check(self) -> None:
        cause = self._cause()
        if cause is None:
            if self._stalled:
                logger.warning("the engine is at work again")
            self._stalled = False
            return
        if not self._stalled:
            logger.error("the engine is stalled: %s", cause)
        self._stalled = True
        raise EngineStalledError(cause)

    def _cause(self) -> str | None:
        if self._heartbeat_timeout and self._silent > self._heartbeat_timeout:
            limit = f"{self._heartbeat_timeout:g} seconds (--engine-heartbeat-timeout)"
            return f"the engine process has given no sign of life for more than {limit}"
        if self._stall_timeout and self._step_seconds > self._stall_timeout:
            limit = f"{self._stall_timeout:g} seconds (--engine-stall-timeout)"
            return f"the engine has been at one step for more than {limit}"
        return None
