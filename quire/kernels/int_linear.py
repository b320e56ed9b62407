"""x times a weight stored in 4 or 8 bits per element (W4A16, W8A16): the packed layout and the products with it.

A weight [N, K] is integer codes, w = (code - zero) * scale, with a scale and a zero point for each group of inputs of
an output, or for each output; or it is codes of 4-bit floats (`kind`), w = float(code) * scale * factor of the output.
Codes are packed for kernels that unpack without moving values between threads:

- `words` [N / 16, K / chunk, 16, plane] int16. A word has 4 codes of 4 bits or 2 of 8 bits, `plane` inputs apart: field
  i of word j of a chunk is input `i * plane + j` of it. So field i of a tile of words is a tile of consecutive inputs,
  with one scale for each output; two neighbouring words are one register, from which a shift and a mask make two
  numbers. Sixteen rows of a chunk are contiguous: whatever the tile, loads are whole cache lines. A field of e2m1 is
  the bits that E2M1_BITS says, so that most become bfloat16 by one shift and one mask.
- `scales` [K / chunk, N, count] int32: the scales of a chunk's planes, 16 bits each, two in a word; with zero points a
  word has the scale and, above it, minus the zero point as the unpacked number has it (`offset`). One scale per output
  is [1, N, 1], in the latter form. Scales are stored once per plane: groups are multiples of it. Those of MXFP4
  (exponents, a group of 32) and NVFP4 (e4m3, a group of 16) stay bytes, one for each field in a word, and a plane may
  have several groups: a word for each.

Groups of which zero is no code, w = (code - middle) * scale + centre, have that centre in place of a zero point, and
both it and the scale in the products' type, in which w is made by one multiplication and sum. In bfloat16 weights of
4 bits are off by 1/90 of a scale on average and 1/10 at most (the nearest bfloat16s of them by 1/140 and 1/17), where
rounding to 4 bits has cost 1/4 and 1/2.

Outputs are padded to a multiple of 16 and inputs to one of the chunk, with scales of zero. Experts have a dimension
before these.
"""

import functools
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F

from quire.kernels.dispatch import early_launch, supports_triton, use_triton
from quire.kernels.int_table import IntConfig, choose, choose_fused
from quire.kernels.rms_norm import RMSNormParams, rms_norm
from quire.kernels.skinny_linear import skinny_linear_torch
from quire.kernels.workspace import outside_pools

BITS = (4, 8)
PANEL = 16  # outputs whose words are contiguous
PLANES = (128, 64, 32)  # inputs of one field of a chunk; the largest that groups and inputs are multiples of
SHORT_PLANE = 16  # for groups that are no multiples of these; an instruction's depth
LOOKUP_ROWS = 1024  # at a time: their numbers are in float32 on the way
HALF = (torch.bfloat16, torch.float16)
# int7: 8 bits of which 7 are used, with a middle of 64; a bfloat16 has them by one mask, of 8 bits not.
Kind = Literal["int", "int7", "e2m1", "nf4", "fp4"]
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# bitsandbytes' numbers: quantiles of a normal distribution, and floats of its own.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_FP4 = (0.0, 0.0052083334, 0.6666667, 1.0, 0.33333334, 0.5, 0.16666667, 0.25)
FP4 = (*_FP4, *(-value for value in _FP4))
# By kind, the number of each code. Those of LOOKED_UP are packed as integers are, and looked up by kernels in the
# weight's dtype.
NUMBERS: dict[str, tuple[float, ...]] = {"e2m1": E2M1, "nf4": NF4, "fp4": FP4}
LOOKED_UP = ("nf4", "fp4")
# Of each field of a word: where the lowest of three bits for exponent and mantissa is, and where the sign. Fields 0 and
# 1 have them as far apart as a bfloat16 has.
E2M1_BITS = ((0, 9), (3, 12), (6, 10), (13, 11))
BYTE_SCALES = {32: torch.uint8, 16: torch.float8_e4m3fn}  # by group: exponents, or fp8


@dataclass(frozen=True)
class PackedIntWeight:
    words: torch.Tensor  # [(E,) N / 16, K / chunk, 16, plane] int16
    scales: torch.Tensor  # [(E,) K / chunk or 1, N, count] int32
    scale_dtype: torch.dtype  # uint8: exponents with a bias of 127
    dtype: torch.dtype  # of the products' inputs
    bits: int
    outputs: int
    inputs: int
    has_zeros: bool  # else the zero point is the middle of the range
    per_channel: bool  # one scale per output
    kind: Kind = "int"  # of codes
    factors: torch.Tensor | None = None  # [(E,) N] float32: of each output, beside the scales of groups
    has_centres: bool = False  # in place of zero points

    @property
    def plane(self) -> int:
        return self.words.shape[-1]

    @property
    def fields(self) -> int:
        return 16 // self.bits

    @property
    def num_chunks(self) -> int:
        return self.words.shape[-3]

    @property
    def parts(self) -> int:
        """Groups of a plane."""
        return self.scales.shape[-1] if self.scale_dtype in BYTE_SCALES.values() else 1

    @property
    def layout(self) -> tuple[object, ...]:
        """What weights must have in common to be multiplied by one kernel."""
        shapes = (self.words.shape, self.scales.shape, self.scale_dtype, self.dtype)
        flags = (self.has_zeros, self.per_channel, self.has_centres, self.kind, self.factors is None)
        return *shapes, self.bits, self.outputs, self.inputs, *flags

    @property
    def joins(self) -> tuple[object, ...]:
        """What weights must have in common for their outputs to be joined."""
        types = (self.scale_dtype, self.dtype, self.bits, self.plane, self.inputs)
        return *types, self.has_zeros, self.per_channel, self.has_centres, self.kind, self.factors is None

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.scales.nbytes + (0 if self.factors is None else self.factors.nbytes)

    def expert(self, index: int) -> "PackedIntWeight":
        factors = None if self.factors is None else self.factors[index]
        return replace(self, words=self.words[index], scales=self.scales[index], factors=factors)


def offset(bits: int, dtype: torch.dtype) -> int:
    """What the kernel's cheapest conversion adds to a code: that of 8 bits does not fit the fraction of a bfloat16."""
    return 1024 if dtype is torch.float16 else 128 if bits == 4 else 0


def check_groups(inputs: int, group_size: int, bits: int) -> None:
    """Raises a ValueError if a weight with these groups cannot be packed."""
    if bits not in BITS:
        raise ValueError(f"weights have {bits} bits; allowed: 4 or 8")
    if group_size != inputs and (group_size % SHORT_PLANE or inputs % group_size):
        raise ValueError(
            f"groups of {group_size} inputs, of {inputs}; allowed: multiples of {SHORT_PLANE} that divide the inputs, "
            f"or all inputs"
        )


def pack_int_weight(
    codes: torch.Tensor,  # [(E,) N, K] uint8: 0 to 2^bits - 1
    scales: torch.Tensor,  # [(E,) N, groups]
    zeros: torch.Tensor | None,  # [(E,) N, groups]: integers; None: 2^(bits - 1), of floats 0
    bits: int,
    dtype: torch.dtype,
    kind: Kind = "int",
    factors: torch.Tensor | None = None,  # [(E,) N]
    centres: torch.Tensor | None = None,  # [(E,) N, groups]: weights of the middle code, instead of zero points
) -> PackedIntWeight:
    """On the device of the codes. Scales that fit neither float16 nor bfloat16 are rounded to `dtype`."""
    *lead, outputs, inputs = codes.shape
    groups = scales.shape[-1]
    assert zeros is None or centres is None
    if tuple(scales.shape[:-1]) != (*lead, outputs) or (zeros is not None and zeros.shape != scales.shape):
        found = f"scales {list(scales.shape)}" + ("" if zeros is None else f", zero points {list(zeros.shape)}")
        raise ValueError(f"codes {list(codes.shape)} have {found}; allowed: {[*lead, outputs, 'groups']} for both")
    if kind != "int" and (bits != (allowed := 8 if kind == "int7" else 4) or zeros is not None):
        raise ValueError(f"codes of {kind} have {allowed} bits and no zero points, not {bits} bits")
    if factors is not None and tuple(factors.shape) != (*lead, outputs):
        raise ValueError(f"factors are {list(factors.shape)}; allowed: {[*lead, outputs]}")
    if dtype not in HALF:
        raise ValueError(f"products are in bfloat16 or float16, not {dtype}")
    if groups == 0 or inputs % groups:
        raise ValueError(f"{inputs} inputs cannot be divided into {groups} groups")
    group_size = inputs // groups
    check_groups(inputs, group_size, bits)
    exact = _in_bytes(scales, group_size) if kind == "e2m1" and groups > 1 else None
    fields, plane = 16 // bits, choose_plane(inputs, inputs if exact is not None else group_size, bits)
    chunk = fields * plane
    padded_n, padded_k = -(-outputs // PANEL) * PANEL, -(-inputs // chunk) * chunk
    if centres is not None:
        scales = scales.to(dtype)
    elif exact is None and scales.dtype not in HALF:
        scales = _in_16_bits(scales, _scale_type(scales, dtype, kind))

    codes = F.pad(codes, (0, padded_k - inputs, 0, padded_n - outputs))
    tiles = codes.view(*lead, padded_n // PANEL, PANEL, padded_k // chunk, fields, plane).transpose(-4, -3)
    words = _field(tiles, 0, bits, kind).contiguous()
    for i in range(1, fields):
        words |= _field(tiles, i, bits, kind)

    if exact is not None:
        octets = F.pad(exact.int(), (0, padded_k // group_size - groups, 0, padded_n - outputs))
        octets = octets.unflatten(-1, (padded_k // chunk, fields, -1))  # [.., N, chunks, fields, parts]
        packed = sum((octets[..., i, :] << (8 * i) for i in range(1, fields)), octets[..., 0, :])
        packed = packed.transpose(-3, -2).contiguous()
        factors = None if factors is None else factors.float().contiguous()
        sizes = (bits, outputs, inputs, False, False)
        return PackedIntWeight(words, packed, BYTE_SCALES[group_size], dtype, *sizes, kind, factors)
    per_channel = groups == 1 and centres is None

    def by_plane(values: torch.Tensor) -> torch.Tensor:
        return _by_plane(values, 0 if per_channel else plane, inputs, padded_k, padded_n)

    low, high = by_plane(scales), centres
    if zeros is not None:
        high = -(zeros.float() + offset(bits, dtype))
    if high is not None:
        packed = low | (by_plane(high.to(dtype)) << 16)
    elif per_channel:
        packed = low
    else:
        packed = low[..., 0::2] | (low[..., 1::2] << 16)
    if not per_channel:
        packed = packed.unflatten(-1, (padded_k // chunk, -1))  # [.., N, chunks, count]
        packed = packed.transpose(-3, -2).contiguous()
    else:
        packed = packed[..., None, :, :].contiguous()
    sizes = (bits, outputs, inputs, zeros is not None, per_channel)
    factors = None if factors is None else factors.float().contiguous()
    return PackedIntWeight(words, packed, scales.dtype, dtype, *sizes, kind, factors, centres is not None)


def _field(tiles: torch.Tensor, i: int, bits: int, kind: Kind) -> torch.Tensor:
    """The codes of a field, moved to its bits."""
    codes = tiles[..., i, :].to(torch.int16)
    if kind == "e2m1":
        low, sign = E2M1_BITS[i]
        return (codes & 7) << low | codes >> 3 << sign
    return codes << (bits * i)


def join_outputs(weights: list[PackedIntWeight]) -> PackedIntWeight | None:
    """One weight with the outputs of all, one after the other; None if they are not packed alike."""
    first = weights[0]
    if len({weight.joins for weight in weights}) > 1 or any(weight.outputs % PANEL for weight in weights[:-1]):
        return None
    if len(weights) == 1:
        return first
    words, scales = torch.cat([w.words for w in weights], -4), torch.cat([w.scales for w in weights], -2)
    factors = [w.factors for w in weights if w.factors is not None]
    outputs = sum(w.outputs for w in weights)
    return replace(
        first, words=words, scales=scales, factors=torch.cat(factors, -1) if factors else None, outputs=outputs
    )


def stack_experts(weights: list[PackedIntWeight | None]) -> PackedIntWeight | None:
    """One weight with a dimension for experts; None if they are not packed alike."""
    first, found = weights[0], [weight for weight in weights if weight is not None]
    if first is None or len(found) != len(weights) or len({weight.layout for weight in found}) > 1:
        return None
    words, scales = torch.stack([w.words for w in found]), torch.stack([w.scales for w in found])
    factors = [w.factors for w in found if w.factors is not None]
    return replace(first, words=words, scales=scales, factors=torch.stack(factors) if factors else None)


def choose_plane(inputs: int, group_size: int, bits: int) -> int:
    """The largest that needs no padding: short ones make short products."""
    fields = 16 // bits
    if group_size != inputs and group_size % PLANES[-1]:
        return SHORT_PLANE
    fits = (p for p in PLANES if (group_size == inputs or group_size % p == 0) and inputs % (fields * p) == 0)
    return next(fits, PLANES[-1])


def _in_bytes(scales: torch.Tensor, group_size: int) -> torch.Tensor | None:
    """MXFP4's or NVFP4's scales as uint8, if they are such; exponents of numbers that are almost zero become those of
    zero."""
    wide = scales.float()
    if group_size == 16:
        narrow = wide.to(torch.float8_e4m3fn)
        fits = torch.equal(narrow.float(), wide) and not bool((wide < 0).any())
        return narrow.view(torch.uint8) if fits else None
    bits = torch.where(wide.abs() < 2.0**-126, 0.0, wide).view(torch.int32)
    return (bits >> 23).to(torch.uint8) if group_size == 32 and not bool((bits & -0x7F800001).any()) else None


def _scale_type(scales: torch.Tensor, dtype: torch.dtype, kind: Kind) -> torch.dtype:
    """What scales are rounded to: those of looked-up numbers are any float32, and float16 has three bits more."""
    if kind not in LOOKED_UP:
        return dtype
    sizes = scales.abs()
    smallest = torch.finfo(torch.float16).smallest_normal
    fits = ((sizes == 0) | (sizes >= smallest)).all() and bool((sizes < torch.finfo(torch.float16).max).all())
    return torch.float16 if fits else dtype


def _in_16_bits(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In the type of 16 bits that loses nothing, if one does; else `dtype`."""
    narrow = (scales.to(kind) for kind in (dtype, *HALF))
    return next((found for found in narrow if torch.equal(found.to(scales.dtype), scales)), scales.to(dtype))


def _by_plane(values: torch.Tensor, plane: int, inputs: int, padded_k: int, padded_n: int) -> torch.Tensor:
    """[.., N, groups] of 16 bits -> [.., N padded, planes] int32; with plane 0 one group -> [.., N padded, 1]."""
    bits = values.view(torch.int16).to(torch.int32) & 0xFFFF
    groups = values.shape[-1]
    if plane:
        starts = torch.arange(0, inputs, plane, device=values.device)
        bits = bits.index_select(-1, starts // (inputs // groups))
        bits = F.pad(bits, (0, padded_k // plane - len(starts)))
    return F.pad(bits, (0, 0, 0, padded_n - values.shape[-2]))


@functools.cache
def _numbers(kind: Kind, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What codes stand for, as `dtype` rounds it. Kept: a graph cannot copy it from the host."""
    return outside_pools(device, lambda: torch.tensor(NUMBERS[kind], device=device).to(dtype).float())


def dequantize_torch(weight: PackedIntWeight, dtype: torch.dtype | None = None) -> torch.Tensor:
    """[(E,) N, K], in the weight's dtype unless told; computed in float32."""
    w = weight
    codes = torch.stack([_codes(w, i) for i in range(w.fields)], -2)  # [.., chunks, 16, fields, plane]
    codes = codes.transpose(-4, -3).flatten(-5, -4).flatten(-3)  # [.., N, K]
    middle, (scales, others) = 64 if w.kind == "int7" else 1 << (w.bits - 1), _unpack_scales(w)
    if not w.per_channel:
        scales = scales.repeat_interleave(w.plane // w.parts, -1)
        others = None if others is None else others.repeat_interleave(w.plane, -1)
    if w.kind in NUMBERS:
        values = _numbers(w.kind, w.dtype, codes.device)[codes] * scales
    elif w.has_centres:
        assert others is not None
        values = (codes - middle) * scales + others
    else:
        values = (codes - middle if others is None else codes - others) * scales
    values = values[..., : w.outputs, : w.inputs]
    return (values if w.factors is None else values * w.factors[..., None]).to(dtype or w.dtype)


def _codes(w: PackedIntWeight, i: int) -> torch.Tensor:
    words = w.words.to(torch.int32)
    if w.kind == "e2m1":
        low, sign = E2M1_BITS[i]
        return words >> low & 7 | (words >> sign & 1) << 3
    return words >> (w.bits * i) & ((1 << w.bits) - 1)


def _unpack_scales(w: PackedIntWeight) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales, and zero points or centres, [.., N, planes (of several parts) or 1] float32."""
    if w.scale_dtype in BYTE_SCALES.values():
        octets = torch.stack([w.scales >> (8 * i) & 255 for i in range(w.fields)], -2)  # [.., chunks, N, fields, parts]
        octets = octets.transpose(-4, -3).flatten(-3)
        if w.scale_dtype is torch.uint8:
            return (octets << 23).view(torch.float32), None
        return octets.to(torch.uint8).view(w.scale_dtype).float(), None
    words = w.scales.transpose(-3, -2).flatten(-2)  # [.., N, words]
    low, high = words.to(torch.int16), (words >> 16).to(torch.int16)
    if w.has_centres:
        return low.view(w.scale_dtype).float(), high.view(w.dtype).float()
    if w.has_zeros:
        return low.view(w.scale_dtype).float(), -high.view(w.dtype).float() - offset(w.bits, w.dtype)
    if not w.per_channel:
        low = torch.stack((low, high), -1).flatten(-2)
    return low.view(w.scale_dtype).float(), None


def lookup(weight: PackedIntWeight, ids: torch.Tensor) -> torch.Tensor:
    """Rows of a weight, [len(ids), K] in its dtype."""
    if len(ids) > LOOKUP_ROWS:
        return torch.cat([lookup(weight, some) for some in ids.split(LOOKUP_ROWS)])
    words = weight.words[ids // PANEL, :, ids % PANEL]  # [n, chunks, plane]
    scales = weight.scales[:, ids]
    factors = None if weight.factors is None else weight.factors[ids]
    rows = replace(weight, words=words[:, :, None], scales=scales, factors=factors, outputs=len(ids))
    return dequantize_torch(rows)


def int_linear_torch(
    x: torch.Tensor,
    weight: PackedIntWeight,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    norm: RMSNormParams | None = None,
    silu: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The reference, in float32: see `int_linear`."""
    wide = dequantize_torch(weight, torch.float32)
    return skinny_linear_torch(x, wide, bias, residual=residual, norm=norm, silu=silu, out_dtype=out_dtype or x.dtype)


def dequantize(weight: PackedIntWeight) -> torch.Tensor:
    """[(E,) N, K] in the weight's dtype, as the torch version rounds it."""
    if not use_triton(weight.words):
        return dequantize_torch(weight)
    from quire.kernels.triton import int_dequantize as kernel

    return kernel.dequantize(weight)


def int_linear(
    x: torch.Tensor,  # [M, K] in the weight's dtype
    weight: PackedIntWeight,  # [N, K]
    bias: torch.Tensor | None = None,  # [N]
    *,
    config: IntConfig,
    residual: torch.Tensor | None = None,  # added to the result; contiguous
    norm: RMSNormParams | None = None,  # RMSNorm of x first; at most MAX_FUSED_ROWS rows
    silu: bool = False,  # the weight is [gate; up], each a multiple of 16: silu(gate) * up, [M, N / 2]
    pdl: bool | None = None,  # start while the kernel before still runs; default: where the device can
) -> torch.Tensor:
    """The same bits for the same input every time; may be captured in a CUDA graph after `prepare_int_linear`."""
    if not use_triton(x):
        return int_linear_torch(x, weight, bias, residual=residual, norm=norm, silu=silu)
    from quire.kernels.triton import int_linear as kernel

    pdl = early_launch(x)["PDL"] if pdl is None else pdl
    return kernel.int_linear(x, weight, config, bias, residual, norm, silu, pdl)


def prepare_int_linear(device: torch.device) -> None:
    """Allocate the kernels' workspace on a device; call it before a capture."""
    if supports_triton(device):
        from quire.kernels.triton.skinny_linear import SplitWorkspace

        SplitWorkspace.of(device)


def linear(x: torch.Tensor, weight: PackedIntWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """By the fastest kernel for the number of rows; for many the weight is dequantized and the library multiplies."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    config = choose(weight.bits, len(x), weight.inputs, weight.outputs, weight.fields * weight.plane)
    if config is None or x.dtype is not weight.dtype:
        return F.linear(x, dequantize(weight).to(x.dtype), bias)
    return int_linear(x, weight, bias, config=config)


def can_fuse(weight: PackedIntWeight) -> bool:
    """Whether norm, SiLU-mul and residual of few rows can be fused with the product; halves must be whole panels."""
    return weight.words.is_cuda and weight.outputs % (2 * PANEL) == 0


def fused_linear(
    x: torch.Tensor,
    weight: PackedIntWeight,
    bias: torch.Tensor | None,
    norm: RMSNormParams | None = None,
    residual: torch.Tensor | None = None,
    silu: bool = False,
) -> torch.Tensor:
    outputs = weight.outputs // 2 if silu else weight.outputs
    config = choose_fused(weight.bits, len(x), weight.inputs, outputs, weight.fields * weight.plane)
    if config.norm_apart and norm is not None:
        x, norm = rms_norm(x, *norm), None
    return int_linear(x, weight, bias, config=config, norm=norm, residual=residual, silu=silu)
