"""Where a recorded step's results lie while threads take blocks of tokens through all calls between two attentions
(replay.c). What is made and used up among those calls needs memory for one block of each thread only: that stays in the
thread's caches, where memory for all tokens would be read from and written to the processor's memory at every call."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.kernels import native

BLOCK, MANY_BLOCKS = 96, 3  # tokens, and blocks of each thread, as in replay.c
ALIGNMENT = 64
LINEAR_FOR_NEXT = 18  # in replay.h

# Calls whose rows depend on no others (is_of_rows in replay.c): which arguments are rows of numbers of each token.
ROWS_OF_CALL = {
    "rms_norm": {0, 1, 3},
    "layer_norm": {0, 1, 4},
    "add": {0, 3},
    "activate": {0, 1},
    "rope_and_write": {0, 1},
    "linear": {0, 3},
    "add_low_rank": {0, 5, 6},
    "int8_linear": {0, 5},
}
INPUT, OUTPUT_OF_ACTIVATE = 0, 1


@dataclass(frozen=True)
class Life:
    """Of a tensor made in a recording: where it was, between which calls."""

    address: int
    nbytes: int
    born: int
    died: int


@dataclass(frozen=True)
class NotedCall:
    kind: str
    arguments: bytes  # as replay.h's Call


@dataclass(frozen=True)
class Blocks:
    calls: torch.Tensor
    arena: torch.Tensor  # as replay.h's
    memory: torch.Tensor


def place_in_blocks(calls: Sequence[NotedCall], lives: Sequence[Life], size: int) -> Blocks | None:
    """The calls of a step of `size` tokens with places in an arena; None where there are no blocks or nothing fits."""
    threads = torch.get_num_threads()
    if size < MANY_BLOCKS * BLOCK * threads:
        return None
    fitting = sorted((life for life in lives if _is_within_blocks(life, calls, size)), key=lambda life: life.born)
    if not fitting:
        return None
    offsets, width = _offsets(fitting, size)
    memory = torch.empty(threads * width * BLOCK, dtype=torch.uint8)
    changed = [bytearray(call.arguments) for call in calls]
    for life, offset in zip(fitting, offsets, strict=True):
        for i in range(life.born, life.died):
            for argument in _arguments_at(life, calls[i]):
                _set_pointer(changed[i], argument, memory.data_ptr() + offset)
    for life in fitting:
        first, last = life.born, life.died - 1
        if last == first + 1 and calls[first].kind == "linear" and calls[last].kind == "activate":
            _merge_if_apart(changed[first], changed[last])
    arena = torch.tensor([memory.data_ptr(), width, width * BLOCK, threads])
    return Blocks(torch.frombuffer(bytearray(b"".join(changed)), dtype=torch.uint8), arena, memory)


def _is_within_blocks(life: Life, calls: Sequence[NotedCall], size: int) -> bool:
    used = calls[life.born : life.died]
    return (
        life.nbytes % size == 0
        and len(used) > 0
        and all(call.kind in ROWS_OF_CALL for call in used)
        and all(_arguments_at(life, call) <= ROWS_OF_CALL[call.kind] for call in used)
        and not any(_looks_inside(life, call) for call in used)
    )


def _offsets(lives: Sequence[Life], size: int) -> tuple[list[int], int]:
    """In bytes of a token, of tensors in the order of their births; and the bytes of all. None overlaps with another
    that is alive, or read by the call before: two calls may be made at once."""
    placed: list[tuple[int, int, int]] = []  # begin, end, when it dies
    offsets, width = [], 0
    for life in lives:
        placed = [one for one in placed if one[2] >= life.born]
        nbytes = -(-life.nbytes // size // ALIGNMENT) * ALIGNMENT
        begin = 0
        for taken, end, _ in sorted(placed):
            if begin + nbytes <= taken:
                break
            begin = max(begin, end)
        placed.append((begin, begin + nbytes, life.died))
        offsets.append(begin)
        width = max(width, begin + nbytes)
    return offsets, width


def _merge_if_apart(linear: bytearray, activate: bytearray) -> None:
    """Both calls can be made at once where the second does not write over what the first reads."""
    if _pointer(linear, INPUT) != _pointer(activate, OUTPUT_OF_ACTIVATE):
        struct.pack_into("q", linear, 0, LINEAR_FOR_NEXT)


def _pointers(call: NotedCall) -> dict[int, int]:
    """By the argument's number."""
    types = native.argument_types(f"quire_{call.kind}")
    return {i: _pointer(call.arguments, i) for i, kind in enumerate(types) if kind == "p"}


def _arguments_at(life: Life, call: NotedCall) -> set[int]:
    return {i for i, pointer in _pointers(call).items() if pointer == life.address}


def _looks_inside(life: Life, call: NotedCall) -> bool:
    return any(life.address < pointer < life.address + life.nbytes for pointer in _pointers(call).values())


def _pointer(arguments: bytes | bytearray, argument: int) -> int:
    found: int = struct.unpack_from("q", arguments, 8 + 8 * argument)[0]
    return found


def _set_pointer(arguments: bytearray, argument: int, pointer: int) -> None:
    struct.pack_into("q", arguments, 8 + 8 * argument, pointer)
