"""Weights that stay quantized on a CPU: packing them, multiplying by them, looking rows of them up."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

import torch

from quire.kernels.native import TYPES, has_amx, native_function
from quire.kernels.native.build import library


@dataclass(frozen=True)
class Format:
    """A block format of GGUF. `index` is its number in the C source."""

    index: int
    elements: int  # numbers per block
    nbytes: int  # bytes per block


_SIZES = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
FORMATS = {name: Format(index, *sizes) for index, (name, sizes) in enumerate(_SIZES.items())}
GROUP = 32  # inputs that are rounded together
LANES = 16  # outputs of a panel
# Of panels that a thread packs: the loader reads several weights at a time, but a vocabulary's outweighs all others.
PART_BYTES = 32 << 20


def is_available() -> bool:
    return library() is not None


def is_fast() -> bool:
    """Whether the processor has instructions for it. The portable kernel is right but slower than plain torch."""
    return is_available() and bool(native_function("quire_quantized_kind")())


@dataclass(frozen=True)
class Packed:
    """A weight [outputs, inputs] in panels."""

    format: Format
    data: torch.Tensor  # uint8 [panels, bytes of a panel]
    outputs: int
    inputs: int

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


def pack(type_name: str, blocks: torch.Tensor, inputs: int, rows: range | None = None, rotary_half: int = 0) -> Packed:
    """From a file's blocks, uint8 [rows, bytes per row]; `rows` of them where not all.

    rotary_half > 0: heads of twice as many rows; rotary pairs are neighbours in the file and half a head apart here.
    """
    kind = FORMATS[type_name]
    rows = rows or range(len(blocks))
    _require_blocks(type_name, blocks, inputs, rows, rotary_half)
    panel = native_function("quire_quantized_panel_bytes")(kind.index, inputs)
    data = torch.empty(-(-len(rows) // LANES), panel, dtype=torch.uint8)
    if len(rows) % LANES:
        data[-1] = 0  # outputs that are not there
    part = max(1, PART_BYTES // panel) * LANES

    def pack_part(start: int) -> None:
        native_function("quire_pack_quantized")(
            kind.index, blocks.data_ptr(), data[start // LANES :].data_ptr(), min(part, len(rows) - start), inputs,
            blocks.stride(0), rows.start + start, rotary_half,
        )  # fmt: skip

    starts = range(0, len(rows), part)
    if len(starts) < 2:
        pack_part(0)
    else:
        with ThreadPoolExecutor(min(len(starts), os.cpu_count() or 1), "pack") as pool:
            list(pool.map(pack_part, starts))
    return Packed(kind, data, len(rows), inputs)


def _require_blocks(type_name: str, blocks: torch.Tensor, inputs: int, rows: range, rotary_half: int) -> None:
    """C reads where these say."""
    kind = FORMATS[type_name]
    held = blocks.shape[1] // kind.nbytes * kind.elements
    if inputs < 1 or inputs % kind.elements or held < inputs or blocks.stride(1) != 1:
        raise ValueError(f"rows of {inputs} inputs are not what {type_name} blocks of {held} hold")
    if rows.step != 1 or rows.start < 0 or rows.stop > len(blocks):
        raise ValueError(f"rows {rows.start} to {rows.stop} are outside of the weight's {len(blocks)} rows")
    if rotary_half < 0 or (rotary_half and len(blocks) % (2 * rotary_half)):
        raise ValueError(f"{len(blocks)} rows are not whole heads of {2 * rotary_half}")


def quantize(type_name: str, weight: torch.Tensor) -> Packed:
    """From a weight [outputs, inputs] in float32 or bf16 to Q8_0 or Q4_1."""
    kind = FORMATS[type_name]
    outputs, inputs = weight.shape
    weight = weight.contiguous()
    blocks = torch.empty(outputs, inputs // kind.elements * kind.nbytes, dtype=torch.uint8)
    native_function("quire_quantize_weight")(
        kind.index, weight.data_ptr(), blocks.data_ptr(), outputs, inputs, TYPES[weight.dtype]
    )
    return pack(type_name, blocks, inputs)


@dataclass(frozen=True)
class Fused:
    """Weights of the same inputs whose outputs follow each other."""

    address_fields: ClassVar = ("table",)  # not to be copied: weights/in_place.py
    parts: tuple[Packed, ...]
    table: torch.Tensor  # int64 [parts, 4], of addresses: it is of use while `parts` are there
    outputs: int


def fuse(parts: Sequence[Packed]) -> Fused:
    rows, offset = [], 0
    for part in parts:
        rows.append([part.data.data_ptr(), part.format.index, part.outputs, offset])
        offset += part.outputs
    return Fused(tuple(parts), torch.tensor(rows, dtype=torch.int64), offset)


def linear(x: torch.Tensor, weights: Fused, bias: torch.Tensor | None) -> torch.Tensor:
    """x [M, K] float32 or bf16 -> [M, outputs] in the type of x.

    Rows are rounded to int8, unless there are many and AMX can multiply them as they are: the weights are then made
    bf16 on the way.
    """
    x = x.contiguous()
    rows, inputs = x.shape
    out = torch.empty(rows, weights.outputs, dtype=x.dtype)
    native_function("quire_quantized_linear")(
        x.data_ptr(), weights.table.data_ptr(), len(weights.parts), bias.data_ptr() if bias is not None else None,
        out.data_ptr(), rows, weights.outputs, inputs, TYPES[x.dtype], has_amx(),
    )  # fmt: skip
    return out


def lookup(ids: torch.Tensor, weight: Packed, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a weight as numbers: ids [N] -> [N, inputs]."""
    ids = ids.to(torch.int64).contiguous()
    out = torch.empty(len(ids), weight.inputs, dtype=dtype)
    native_function("quire_quantized_lookup")(
        weight.format.index, weight.data.data_ptr(), ids.data_ptr(), out.data_ptr(), len(ids), weight.outputs,
        weight.inputs, TYPES[dtype],
    )  # fmt: skip
    return out
