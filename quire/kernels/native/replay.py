"""A step's kernel calls, noted as Python would make them, and made in one call of C: what Python takes for 270 of them
is a third of a small model's step. One recording serves steps of every size up to its own."""

import struct
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire.kernels import native
from quire.kernels.native.replay_blocks import Blocks, Life, NotedCall, place_in_blocks

# In the order of replay.c: which argument counts the rows that a call is for.
KINDS = {
    "rms_norm": 4,
    "rope_and_write": 9,
    "linear": 4,
    "linear_amx": 4,
    "quantized_linear": 5,
    "attention": 7,
    "route": 4,
    "moe": 12,
    "layer_norm": 5,
    "add": 4,
    "activate": 2,
    "add_low_rank": 7,
    "all_reduce": 2,
    "encoder_linear": 7,
    "encoder_attention": 8,
    "latent_write": 7,
    "latent_attention": 12,
    "int8_linear": 6,
}
# Which argument counts requests.
ROWS_OF_ATTENTION = {"attention": 9, "encoder_attention": 9, "latent_attention": 15}
# Of a text alone: replay_texts.c knows what of their arguments is a row for each token.
OF_TEXTS = {"encoder_linear", "encoder_attention", "layer_norm", "add", "activate"}
MAX_ARGUMENTS = 26
_NUMBERS = {name: number for number, name in enumerate(KINDS)}

_aten = torch.ops.aten
_MAKE = {_aten.empty.memory_format, _aten.empty_like.default}
_LOOK = {_aten.view.default, _aten.detach.default, _aten.slice.Tensor}

# So many tokens in so many rows, whose first so many keys are in blocks that all rows share.
Replay = Callable[[int, int, int], None]


class NotReplayableError(Exception):
    """What was done inside a recording that cannot be replayed."""


@dataclass(frozen=True)
class Call(NotedCall):
    shape: tuple[Any, ...]  # all that must not change with the number of tokens


class Recording(TorchDispatchMode):
    """Of a step of `size` tokens. The kernels called inside are noted, not run, and the tensors made there get memory
    that lasts. Whatever else is computed there, or not for a multiple of `size` rows, raises NotReplayableError."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.calls: list[Call] = []
        self._memory = Memory(self.calls)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # there is none here; True would import all of torch's compiler, a second in the middle of a step

    def __enter__(self) -> "Recording":
        self._instead = native.calls_go_to(self._called)
        self._instead.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._lives = list(self._memory.lives)  # what is left are results
        super().__exit__(*error)
        self._instead.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _MAKE and func not in _LOOK:
            raise NotReplayableError(f"torch computes {func}")
        made = func(*args, **(kwargs or {}))
        if func in _MAKE:
            return self._memory.for_tensor(made)
        self._memory.also(args[0], made)
        return made

    def _called(self, name: str, arguments: tuple[Any, ...]) -> None:
        kind = name.removeprefix("quire_")
        if kind not in KINDS:
            raise NotReplayableError(f"{name} is called")
        rows = arguments[KINDS[kind]]
        if rows % self.size:
            raise NotReplayableError(f"{name} is called for {rows} rows in a step of {self.size} tokens")
        self.calls.append(_noted(kind, arguments, rows // self.size))

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def replayed(self) -> Replay:
        """Makes the calls for a step of any size: its inputs are in the first rows of those that were recorded."""
        block, memory = self._packed(), self._memory
        replay, count, size = native.native_function("quire_replay"), len(self.calls), self.size
        blocks = place_in_blocks(self.calls, self._lives, size)
        placed = (blocks.calls.data_ptr(), blocks.arena.data_ptr()) if blocks else (None, None)

        def run(tokens: int, rows: int, shared: int, memory: Memory = memory, blocks: Blocks | None = blocks) -> None:
            replay(block.data_ptr(), *placed, count, size, tokens, rows, shared)

        return run

    @property
    def is_of_texts(self) -> bool:
        """Whether the calls compute texts whole, each from its own tokens alone."""
        kinds = {call.kind for call in self.calls}
        return "encoder_attention" in kinds and kinds <= OF_TEXTS

    def replayed_by_texts(self, starts: torch.Tensor, last: torch.Tensor) -> tuple[Replay, torch.Tensor]:
        """As `replayed`, with threads that take some texts each; these begin and end at `starts`. Also where the rows
        of `last`, the last result, are afterwards."""
        block, memory, out = self._packed(), self._memory, torch.empty_like(last)
        replay, count, size = native.native_function("quire_replay_texts"), len(self.calls), self.size
        places = torch.tensor(memory.places(), dtype=torch.int64)
        row = last.element_size() * last.shape[1]

        def run(tokens: int, rows: int, shared: int, memory: Memory = memory) -> None:
            replay(
                block.data_ptr(), count, size, tokens, rows, starts.data_ptr(), places.data_ptr(), len(places),
                last.data_ptr(), out.data_ptr(), row,
            )  # fmt: skip

        return run, out

    def _packed(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(b"".join(call.arguments for call in self.calls)), dtype=torch.uint8)


class Memory:
    """Pieces for tensors, taken again for others of the same size when the last tensor that looks at one is gone. A
    token's rows are then at one place in all of them: threads may be at different calls, each with its own tokens
    (replay.c)."""

    def __init__(self, calls: Sequence[NotedCall]) -> None:
        self.lives: list[Life] = []  # of tensors that are gone
        self._calls = calls  # as many as are noted so far
        self._pieces: list[torch.Tensor] = []
        self._free: list[int] = []  # of those
        self._looking: list[int] = []  # tensors at each
        self._born: list[int] = []  # before which call
        self._piece_of: dict[int, int] = {}  # by the tensor's id

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self._pieces)

    def places(self) -> list[tuple[int, int]]:
        """Where each piece begins, and its bytes."""
        return [(piece.data_ptr(), piece.nbytes) for piece in self._pieces]

    def for_tensor(self, like: torch.Tensor) -> torch.Tensor:
        """Another, of its shape and type, all of it contiguous."""
        fits = [i for i in self._free if self._pieces[i].nbytes == like.nbytes]
        if fits:
            number = fits[0]
            self._free.remove(number)
        else:
            number = len(self._pieces)
            self._pieces.append(torch.empty(like.nbytes, dtype=torch.uint8))
            self._looking.append(0)
            self._born.append(0)
        self._born[number] = len(self._calls)
        made = self._pieces[number][: like.nbytes].view(like.dtype).view(like.shape)
        self._look(made, number)
        return made

    def also(self, known: torch.Tensor, other: torch.Tensor) -> None:
        number = self._piece_of.get(id(known))
        if number is not None:
            self._look(other, number)

    def _look(self, tensor: torch.Tensor, number: int) -> None:
        self._piece_of[id(tensor)] = number
        self._looking[number] += 1
        weakref.finalize(tensor, self._gone, id(tensor)).atexit = False

    def _gone(self, tensor_id: int) -> None:
        number = self._piece_of.pop(tensor_id)
        self._looking[number] -= 1
        if not self._looking[number]:
            self._free.append(number)
            piece = self._pieces[number]
            self.lives.append(Life(piece.data_ptr(), piece.nbytes, self._born[number], len(self._calls)))


def _noted(kind: str, arguments: tuple[Any, ...], rows_of_each: int) -> Call:
    types = native.argument_types(f"quire_{kind}")
    values = [float(a) if t == "f" else int(a or 0) for t, a in zip(types, arguments, strict=True)]
    packed = b"".join(struct.pack("d" if isinstance(value, float) else "q", value) for value in values)
    changing = {KINDS[kind], ROWS_OF_ATTENTION.get(kind, KINDS[kind])}
    fixed = [v for i, (t, v) in enumerate(zip(types, values, strict=True)) if t != "p" and i not in changing]
    padding = bytes(8 * (MAX_ARGUMENTS - len(values)))
    return Call(kind, struct.pack("q", _NUMBERS[kind]) + packed + padding, (kind, rows_of_each, *fixed))
