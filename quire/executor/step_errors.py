"""Errors of a step, as they are told to another process."""

from quire.executor.worker_messages import StepError
from quire.messages.plan import DeviceLostError
from quire.messages.requests import sendable

ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ValueError, TypeError, MemoryError, DeviceLostError)
}


class WorkersLostError(DeviceLostError):
    """A worker process is gone, or ranks no longer agree: the engine must exit."""


def told(error: BaseException) -> StepError:
    return StepError(type(error).__name__, sendable(str(error)))


def rebuilt(error: StepError) -> Exception:
    kind = ERRORS.get(error.kind)
    return kind(error.message) if kind is not None else RuntimeError(f"{error.kind}: {error.message}")


def diverged(rank: int, error: StepError) -> WorkersLostError:
    return WorkersLostError(f"a step failed on rank {rank} and not on all others: {error.kind}: {error.message}")
