"""What front ends and an engine process say to each other, and how it becomes bytes.

msgpack of typed structs: nothing that is received can name code to run. Arrays of some size travel as frames of their
own, uncopied.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from quire.messages.requests import EngineCoreOutputs, EngineCoreRequest
from quire.messages.sampling_params import MAX_N

INLINE_BYTES = 1024  # a smaller array costs less inside the message than as a frame
ARRAY_KINDS = "biuf"
CLIENT_SHIFT = 40  # a request's index is (client << CLIENT_SHIFT) + a number of the client's own


class Hello(msgspec.Struct, tag=True):
    """A front end's first word: where it listens, and the number of its range of request indices. Without a number it
    only hears of the engine's beginning and end."""

    output_address: str
    client: int | None = 0


class Goodbye(msgspec.Struct, tag=True):
    """A front end has gone, by its own word or by that of who saw it die: nobody waits for its requests."""

    client: int


class AddRequests(msgspec.Struct, tag=True):
    requests: list[EngineCoreRequest]


class FinishRequests(msgspec.Struct, tag=True):
    request_ids: list[str]


class Call(msgspec.Struct, tag=True):
    """Something to do once, answered with a Result of the same number."""

    number: int
    name: str  # one of those the engine process lists


class Watch(msgspec.Struct, tag=True):
    """A front end listens from now on, and wants heartbeats. Not earlier: they would pile up."""

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
    """The engine can serve."""

    max_model_len: int
    summary: EngineSummary
    num_blocks: int = 0  # of the KV cache
    max_num_seqs: int = 0  # that can run at a time


class Heartbeat(msgspec.Struct, tag=True):
    """The engine process runs. `step_seconds` is how long its loop has been at what it does now; 0 if that is waiting
    for work."""

    step_seconds: float = 0.0


class Outputs(msgspec.Struct, tag=True):
    outputs: EngineCoreOutputs


class Result(msgspec.Struct, tag=True):
    number: int
    error: str | None = None
    values: dict[str, int] = {}


class Dead(msgspec.Struct, tag=True):
    """The engine's last word."""

    cause: str


ToEngine = Hello | Goodbye | AddRequests | FinishRequests | Call | Watch | Shutdown
FromEngine = Ready | Heartbeat | Outputs | Result | Dead


@dataclass(slots=True)
class Unreadable:
    """A message that an engine process cannot decode, and who waits for an answer to it."""

    cause: str
    indices: list[int]  # of sequences that it asks for
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
            pass  # not even that can be read: no front end of ours wrote it
        return found


class Codec:
    """Messages to and from lists of frames: the msgpack first, then the large arrays it mentions."""

    def __init__(self, received: Any) -> None:
        """`received` is the union of message types that this side takes."""
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
