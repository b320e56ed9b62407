"""Integer weights, and 4-bit floats as such, into a CPU's panels by way of GGUF's blocks, which hold them exactly."""

import torch

from quire.kernels.int_linear import LOOKED_UP
from quire.kernels.native import quantized
from quire.kernels.native.quantized import GROUP, Packed
from quire.quantization.int_weight import IntWeight

# Of float16, which blocks have their scales in: the largest number, and half the step between the smallest.
MAX_SCALE = 65504.0
BFLOAT16_ERROR = 2.0**-9  # of dequantizing to it, relative

PackedInt = tuple[Packed, torch.Tensor | None]  # and the order of inputs


def pack_int_weight(weight: IntWeight, exact: bool) -> PackedInt | str:
    """The panels, and the order that inputs have there; or why there can be none.

    A group of 128 becomes four of 32 with the same scale. exact: scales must not be rounded at all; else to float16, by
    less than dequantized weights would be in bfloat16.
    """
    if weight.kind in LOOKED_UP:
        return f"its {weight.kind} codes are no integers"
    weight, order = weight.as_integers().in_group_order()
    outputs, inputs = weight.codes.shape
    if inputs % GROUP:
        return f"its {inputs} inputs are no multiple of {GROUP}"
    groups = weight.groups().view(-1, GROUP)
    if not torch.equal(groups[:, 0], groups[:, -1]):  # they ascend
        return f"its groups are no multiples of {GROUP} inputs"
    scales = weight.scales[:, groups[:, 0]]
    halves = scales.half()
    allowed = 0.0 if exact else scales.abs() * BFLOAT16_ERROR
    if not bool(((halves.float() - scales).abs() <= allowed).all()):
        return "its scales do not fit float16"
    codes = weight.codes.view(outputs, -1, GROUP)
    zeros = None if weight.zeros is None else weight.zeros[:, groups[:, 0], None]
    found = _blocks(codes, zeros, weight)
    if isinstance(found, str):
        return found
    type_name, numbers = found
    blocks = torch.cat((halves[..., None].view(torch.uint8), numbers), dim=-1)
    return quantized.pack(type_name, blocks.view(outputs, -1), inputs), order


def _blocks(codes: torch.Tensor, zeros: torch.Tensor | None, weight: IntWeight) -> tuple[str, torch.Tensor] | str:
    """The name of a format and what its blocks have behind the scale, uint8 [outputs, groups of 32, bytes]."""
    if weight.bits == 4 and zeros is None:
        return "Q4_0", _nibbles(codes)
    if weight.bits == 4:
        # Five bits about 16 hold the difference of two numbers of four bits, without rounding the zero points.
        assert zeros is not None
        shifted = codes + (16 - zeros).to(torch.uint8)
        return "Q5_0", torch.cat((_fifth_bits(shifted), _nibbles(shifted & 15)), dim=-1)
    if zeros is None:
        return "Q8_0", codes ^ 128
    shifted = codes.to(torch.int16) - zeros
    if int(shifted.min()) < -128 or int(shifted.max()) > 127:
        return "its 8-bit numbers minus their zero points need more than 8 bits"
    return "Q8_0", shifted.to(torch.int8).view(torch.uint8)


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 32] -> [..., 16], with numbers i and i + 16 in a byte."""
    return codes[..., :16] | codes[..., 16:] << 4


def _fifth_bits(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 32] -> [..., 4], that of number i in bit i."""
    eight = (codes >> 4).contiguous().view(torch.int64)
    # Moves the lowest bit of byte i to bit 56 + i: 8 * i and 7 * (8 - i) bits further.
    return (eight * 0x0102040810204080 >> 56).to(torch.uint8)
