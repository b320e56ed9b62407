"""GGUF's blocks as integer codes with a scale and perhaps a centre per group of inputs, on any device.

`decode` maps a file's rows, uint8 [rows, bytes per row], to codes of 4 or 8 bits: those of 5 and 6 bits become 8, which
is simpler to unpack and takes 9 bits per weight, scales included, where files have 5.5 and 6.6.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quire.kernels.int_linear import Kind
from quire.quantization.fp4 import powers_of_two


@dataclass(frozen=True)
class Decoded:
    """w = (code - middle) * scale + centre; of 4-bit floats float(code) * scale."""

    kind: Kind
    bits: int
    codes: torch.Tensor  # uint8 [rows, inputs]
    scales: torch.Tensor  # [rows, groups]
    centres: torch.Tensor | None = None  # float32 [rows, groups]; None: zero

    @property
    def middle(self) -> int:
        return 64 if self.kind == "int7" else 1 << (self.bits - 1)


@dataclass(frozen=True)
class BlockFormat:
    elements: int  # numbers per block
    nbytes: int  # bytes per block
    bits: int  # of its codes here
    group_size: int
    decode: Callable[[torch.Tensor], Decoded]  # of blocks [rows, blocks, bytes]: codes, scales are not flat yet


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at a byte of each block, [rows, blocks, 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[.., n] -> [.., 2, n]: the low halves of all bytes, then the high halves."""
    return torch.stack((packed & 15, packed >> 4), -2)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """[.., 4] -> 16 or 0 for each of 32 numbers."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> places & 1) << 4).flatten(-2)


def _q4_0(blocks: torch.Tensor) -> Decoded:
    return Decoded("int", 4, _nibbles(blocks[..., 2:]), _half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> Decoded:
    return _centred(4, _nibbles(blocks[..., 4:]), _half(blocks, 0).float(), _half(blocks, 2).float())


def _q5_0(blocks: torch.Tensor) -> Decoded:
    codes = _nibbles(blocks[..., 6:]).flatten(-2) | _fifth_bits(blocks[..., 2:6])
    return Decoded("int7", 8, codes + (64 - 16), _half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> Decoded:
    codes = _nibbles(blocks[..., 8:]).flatten(-2) | _fifth_bits(blocks[..., 4:8])
    return _centred(5, codes, _half(blocks, 0).float(), _half(blocks, 2).float())


def _q8_0(blocks: torch.Tensor) -> Decoded:
    return Decoded("int", 8, blocks[..., 2:] ^ 128, _half(blocks, 0))


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minimums of the eight groups of a Q4_K or Q5_K block, [rows, blocks, 8] float32; see
    checkpoint/dequantize.py."""
    low_scales, low_mins, rest = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((low_scales & 63, (rest & 15) | (low_scales >> 6 << 4)), -1)
    mins = torch.cat((low_mins & 63, (rest >> 4) | (low_mins >> 6 << 4)), -1)
    return _half(blocks, 0).float() * scales, -_half(blocks, 2).float() * mins


def _q4_k(blocks: torch.Tensor) -> Decoded:
    return _centred(4, _nibbles(blocks[..., 16:].unflatten(-1, (4, 32))), *_k_scales(blocks))


def _q5_k(blocks: torch.Tensor) -> Decoded:
    places = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    fifth = (blocks[..., None, 16:48] >> places & 1) << 4  # [.., groups, 32]
    codes = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).flatten(-3, -2) | fifth
    return _centred(5, codes, *_k_scales(blocks))


def _q6_k(blocks: torch.Tensor) -> Decoded:
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    low = blocks[..., :128].unflatten(-1, (2, 2, 32))
    low = torch.cat((low & 15, low >> 4), -2)  # [.., halves, 4 runs, 32]
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> places & 3
    scales = _half(blocks, 208).float() * blocks[..., 192:208].contiguous().view(torch.int8)
    narrow = scales.half()  # rounds less than bfloat16 would
    return Decoded("int7", 8, (low | high << 4) + (64 - 32), narrow if bool(narrow.isfinite().all()) else scales)


def _mxfp4(blocks: torch.Tensor) -> Decoded:
    return Decoded("e2m1", 4, _nibbles(blocks[..., 1:]), powers_of_two(blocks[..., :1]))


def _centred(bits: int, codes: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor) -> Decoded:
    """Of weights code * scale + minimum; codes of 5 bits go to the middle of 7."""
    middle = 1 << (bits - 1)
    centres = minimums + middle * scales
    if bits == 4:
        return Decoded("int", 4, codes, scales, centres)
    return Decoded("int7", 8, codes + (64 - middle), scales, centres)


FORMATS = {
    "Q4_0": BlockFormat(32, 18, 4, 32, _q4_0),
    "Q4_1": BlockFormat(32, 20, 4, 32, _q4_1),
    "Q5_0": BlockFormat(32, 22, 8, 32, _q5_0),
    "Q5_1": BlockFormat(32, 24, 8, 32, _q5_1),
    "Q8_0": BlockFormat(32, 34, 8, 32, _q8_0),
    "Q4_K": BlockFormat(256, 144, 4, 32, _q4_k),
    "Q5_K": BlockFormat(256, 176, 8, 32, _q5_k),
    "Q6_K": BlockFormat(256, 210, 8, 16, _q6_k),
    "MXFP4": BlockFormat(32, 17, 4, 32, _mxfp4),
}


def decode(type_name: str, rows: torch.Tensor) -> Decoded:
    """Rows of a file, uint8 [rows, bytes per row]."""
    kind = FORMATS[type_name]
    found = kind.decode(rows.unflatten(1, (-1, kind.nbytes)))
    centres = None if found.centres is None else found.centres.flatten(1)
    return Decoded(found.kind, found.bits, found.codes.flatten(1), found.scales.flatten(1), centres)
