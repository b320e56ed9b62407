"""Messages between front ends and an engine process, and their encoding.

msgpack of typed structs: received data cannot name code to run. Large arrays are sent as separate frames, without a
copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from quire.messages.features import FeatureSupport
from quire.messages.requests import EngineCoreOutputs, EngineCoreRequest
from quire.messages.sampling_params import MAX_N

INLINE_BYTES = 1024  # smaller arrays are cheaper inside the message
ARRAY_KINDS = "biuf"
CLIENT_SHIFT = 40  # a request's index is (client << CLIENT_SHIFT) + the client's own counter


class Hello(msgspec.Struct, tag=True):
    """Registers a front end: its address, and the number of its range of request indices. Without a number it only
    receives Ready and Dead."""

    output_address: str
    client: int | None = 0


class Goodbye(msgspec.Struct, tag=True):
    """Unregisters a front end, sent by itself or by its supervisor: its requests are aborted."""

    client: int


class AddRequests(msgspec.Struct, tag=True):
    requests: list[EngineCoreRequest]


class FinishRequests(msgspec.Struct, tag=True):
    request_ids: list[str]


class Call(msgspec.Struct, tag=True):
    """A remote call; the reply is a Result of the same number."""

    number: int
    name: str  # must be registered in the engine process
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class Watch(msgspec.Struct, tag=True):
    """A front end reads messages from now on: start its heartbeats. Earlier ones would pile up."""

    client: int


class Shutdown(msgspec.Struct, tag=True):
    pass


class EngineSummary(msgspec.Struct):
    """What the start-up log says, in words."""

    device: str  # with the model's size, precision and kernels
    kv_cache: str

    def lines(self, model_name: str) -> tuple[str, str]:
        return f"{model_name} · {self.device}", self.kv_cache


class Ready(msgspec.Struct, tag=True):
    """The engine is ready to serve."""

    max_model_len: int
    summary: EngineSummary
    num_blocks: int = 0  # of the KV cache
    max_num_seqs: int = 0  # that can run at a time
    features: FeatureSupport | None = None  # None: prompts are token ids only


class Heartbeat(msgspec.Struct, tag=True):
    """The engine process is alive. `step_seconds` is the duration of the current step so far; 0 if idle."""

    step_seconds: float = 0.0


class Outputs(msgspec.Struct, tag=True):
    outputs: EngineCoreOutputs


class Result(msgspec.Struct, tag=True):
    number: int
    error: str | None = None
    values: Any = None


class Dead(msgspec.Struct, tag=True):
    """The engine's last message, with the cause of its exit."""

    cause: str


ToEngine = Hello | Goodbye | AddRequests | FinishRequests | Call | Watch | Shutdown
FromEngine = Ready | Heartbeat | Outputs | Result | Dead


@dataclass(slots=True)
class Unreadable:
    """A message that an engine process cannot decode, and the requests and calls in it that must be failed."""

    cause: str
    indices: list[int]  # of its sequences
    calls: list[int]

    @classmethod
    def of(cls, frames: Sequence[Any], cause: str) -> "Unreadable":
        found = cls(cause, [], [])
        try:
            message = msgspec.msgpack.decode(frames[0])
            if message["type"] == Call.__name__:
                found.calls.append(int(message["number"]))
            for request in message.get("requests", ()):
                first, count = int(request["index"]), int(request["params"].get("n", 1))
                found.indices += range(first, first + min(max(count, 1), MAX_N))
        except (msgspec.MsgspecError, TypeError, ValueError, LookupError, AttributeError):
            pass  # unreadable: not from one of our front ends
        return found


class Codec:
    """Encodes messages as lists of frames: the msgpack first, then its large arrays."""

    def __init__(self, received: Any = None) -> None:
        """`received` is the union of message types that this side accepts; left out where it only encodes."""
        self._frames: list[memoryview] = []
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_array)
        self._received: Sequence[Any] = ()
        self._decoder = msgspec.msgpack.Decoder(received, dec_hook=self._decode_array)

    def encode(self, message: Any) -> list[Any]:
        self._frames = []
        return [self._encoder.encode(message), *self._frames]

    def decode(self, frames: Sequence[Any]) -> Any:
        """A ValueError for anything but a well-formed message of the expected types."""
        self._received = frames
        try:
            return self._decoder.decode(frames[0])
        except (msgspec.MsgspecError, TypeError, ValueError, LookupError, OverflowError) as error:
            raise ValueError(f"not a message: {error}") from error

    def _encode_array(self, value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, np.ndarray):
            raise TypeError(f"cannot send a {type(value).__name__}")
        data = np.ascontiguousarray(value)
        if data.nbytes < INLINE_BYTES:
            return data.dtype.str, data.shape, data.tobytes()
        self._frames.append(data.data.cast("B"))
        return data.dtype.str, data.shape, len(self._frames)

    def _decode_array(self, kind: type, value: Any) -> Any:
        if kind is not np.ndarray:
            raise TypeError(f"cannot receive a {kind.__name__}")
        name, shape, data = value
        dtype = np.dtype(str(name))
        if dtype.kind not in ARRAY_KINDS:
            raise ValueError(f"arrays of {name} are not accepted")
        return np.frombuffer(self._received[data] if isinstance(data, int) else data, dtype).reshape(shape)
