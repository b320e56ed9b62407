"""A step's kernel calls, noted while Python makes them once, and made again in one call: what Python takes for 270 of
them is a third of a small model's step."""

import struct
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire.kernels import native

# In the order of replay.c.
KINDS = (
    "rms_norm",
    "rope_and_write",
    "linear",
    "linear_amx",
    "quantized_linear",
    "attention",
    "route",
    "moe",
    "layer_norm",
    "add",
    "activate",
    "quantized_linear_amx",
)
MAX_ARGUMENTS = 22

_aten = torch.ops.aten
# They make tensors and look at them in other ways, but compute nothing.
_WITHOUT_WORK = {_aten.empty.memory_format, _aten.empty_like.default, _aten.view.default, _aten.detach.default}


class Recording(TorchDispatchMode):
    """What was called inside, in `calls`, and every tensor made there, so that none moves. `faithful` says whether
    replaying is the same as running again: nothing computed but by kernels that can be replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.tensors: list[Any] = []
        self.faithful = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # there is none here; True would import all of torch's compiler, a second in the middle of a step

    def __enter__(self) -> "Recording":
        self._watching = native.watched_by(self._called)
        self._watching.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._watching.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.faithful &= func in _WITHOUT_WORK
        self.tensors.append(made)
        return made

    def _called(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.faithful &= name.removeprefix("quire_") in KINDS
        self.calls.append((name, arguments))

    def replayed(self) -> Callable[[], None]:
        """Calls it all again."""
        packed = b"".join(_pack(name, arguments) for name, arguments in self.calls)
        block, kept = torch.frombuffer(bytearray(packed), dtype=torch.uint8), self.tensors
        replay, count = native.native_function("quire_replay"), len(self.calls)

        def run(kept: list[Any] = kept) -> None:
            replay(block.data_ptr(), count)

        return run


def _pack(name: str, arguments: tuple[Any, ...]) -> bytes:
    values = [struct.pack("d", a) if isinstance(a, float) else struct.pack("q", a or 0) for a in arguments]
    kind = struct.pack("q", KINDS.index(name.removeprefix("quire_")))
    return kind + b"".join(values) + bytes(8 * (MAX_ARGUMENTS - len(values)))
