"""Errors of a step, as they are told to another process."""

from collections.abc import Mapping
from concurrent.futures import Future

from quire.distributed.layout import WorldLayout
from quire.executor.base import PendingOutput
from quire.executor.worker_messages import StepError
from quire.messages.plan import DeviceLostError
from quire.messages.requests import sendable

ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ValueError, TypeError, MemoryError, DeviceLostError)
}


class WorkersLostError(DeviceLostError):
    """A worker process is gone, or ranks no longer agree: the engine must exit."""


def told(error: BaseException, place: int = 0) -> StepError:
    return StepError(type(error).__name__, sendable(str(error)), place)


def launched(pending: PendingOutput) -> bool:
    """Whether a step ran to its end, whatever its result: a UniProcExecutor in place knows of errors before."""
    return not (isinstance(pending, Future) and pending.done() and pending.exception() is not None)


def rebuilt(error: StepError) -> Exception:
    kind = ERRORS.get(error.kind)
    return kind(error.message) if kind is not None else RuntimeError(f"{error.kind}: {error.message}")


def out_of_step(errors: Mapping[int, StepError], layout: WorldLayout) -> WorkersLostError | None:
    """If a step failed on some of the ranks that share layers only, or on all but not at the same place: one that has
    left a step early exchanges what belongs to the next one."""
    for rank in sorted(errors):
        others = layout.tensor_ranks(rank)
        if not errors.keys() >= set(others):
            return diverged(rank, errors[rank])
        if len({errors[other].place for other in others}) > 1:
            named = "; ".join(f"on rank {other}: {errors[other].kind}: {errors[other].message}" for other in others)
            return WorkersLostError(f"a step failed at different places: {named}")
    return None


def diverged(rank: int, error: StepError) -> WorkersLostError:
    return WorkersLostError(f"a step failed on rank {rank} and not on all others: {error.kind}: {error.message}")
