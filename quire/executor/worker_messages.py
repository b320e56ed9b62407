"""Messages between an executor and its worker processes, and their encoding.

Plans and results are typed structs; worker_calls.py has how calls of workers' methods are written.
"""

from typing import Any

import msgspec
import numpy as np

from quire.messages.plan import GrammarMask, ModelRunnerOutput, SchedulerOutput
from quire.messages.protocol import Codec


class Execute(msgspec.Struct, tag=True):
    plan: SchedulerOutput


class Sample(msgspec.Struct, tag=True):
    """For the plan executed last. The reply is the StepDone of that number."""

    step: int
    grammar: GrammarMask | None


class Invoke(msgspec.Struct, tag=True):
    """Call the worker's method, or a function with the worker, after the plans before it; the reply is a Returned."""

    number: int
    call: bytes  # by WorkerCalls, as what is returned


class Stop(msgspec.Struct, tag=True):
    pass


class StepError(msgspec.Struct):
    """Why a step failed on a rank."""

    kind: str  # of the exception
    message: str
    place: int = 0  # in the step, if it was not launched to its end: how many collectives the rank has taken part in


class Joined(msgspec.Struct, tag=True):
    """The worker has met all others."""

    rank: int


class StepDone(msgspec.Struct, tag=True):
    """From the rank that answers; from others of its machine only if their part of the step has failed."""

    rank: int
    step: int
    output: ModelRunnerOutput | None = None
    error: StepError | None = None


class Returned(msgspec.Struct, tag=True):
    rank: int
    number: int
    value: bytes = b""
    error: bytes | None = None


class Failed(msgspec.Struct, tag=True):
    """The worker's last message."""

    rank: int
    error: bytes


class NodeLost(msgspec.Struct, tag=True):
    """The last message of a machine whose workers have ended."""

    node: int
    cause: str


ToWorker = Execute | Sample | Invoke | Stop
FromWorker = Joined | StepDone | Returned | Failed | NodeLost

LOADED = -1  # the number of the Returned that says that the model is loaded


class WritableCodec(Codec):
    """Torch shares memory with the arrays of a plan, and warns if it may not write to it."""

    def _decode_array(self, kind: type, value: Any) -> Any:
        array: np.ndarray = super()._decode_array(kind, value)
        return array if array.flags.writeable else array.copy()
