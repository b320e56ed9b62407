"""Weights in 4 or 8 bits to 16-bit numbers, for products of many rows by the library."""

import torch
import triton
import triton.language as tl

from quire.kernels.int_linear import PackedIntWeight
from quire.kernels.triton.int_linear import layout_flags, word_rows
from quire.kernels.triton.int_unpack import CENTRES, POINTS, byte_scale, high_half, low_half, scale_word, unpack


@triton.jit
def _dequantize_kernel(
    words,
    scales,
    factors,
    y,  # [.., N, K]
    K,
    N,
    panels,  # of one weight
    chunks,
    PLANE: tl.constexpr,
    BITS: tl.constexpr,
    COUNT: tl.constexpr,
    CODES: tl.constexpr,
    ZEROS: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    SCALE_BF16: tl.constexpr,
    FACTORS: tl.constexpr,
    EVEN_K: tl.constexpr,
    DTYPE: tl.constexpr,
    PANELS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """A program: some panels of one chunk."""
    FIELDS: tl.constexpr = 16 // BITS
    BLOCK_N: tl.constexpr = PANELS * 16
    chunk, expert = tl.program_id(0), tl.program_id(2).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_n = tl.minimum(n, panels * 16 - 1)
    j = tl.arange(0, PLANE)
    at = word_rows(words + expert * panels * (chunks * 16 * PLANE), inside_n, chunks, PLANE)
    tile = tl.load(at + chunk * (16 * PLANE) + j[None, :], eviction_policy="evict_first")
    BYTES: tl.constexpr = CODES == "mxfp4" or CODES == "nvfp4"
    scale_chunk = expert if PER_CHANNEL else expert * chunks + chunk
    at_scale = scales + scale_chunk * (panels * 16 * COUNT) + inside_n[:, None] * COUNT
    some_scales = tl.load(at_scale + ((j // (PLANE // COUNT)) if BYTES else tl.arange(0, COUNT))[None, :])
    y_rows = y + (expert * N + n.to(tl.int64))[:, None] * K
    for field in tl.static_range(FIELDS):
        plane = chunk * FIELDS + field
        if BYTES:
            upper = tile
            scale = byte_scale(some_scales, field, CODES)
        else:
            word = scale_word(some_scales, field, COUNT, ZEROS)
            upper = (word >> 16).to(tl.int16).to(DTYPE, bitcast=True)[:, None]
            if PER_CHANNEL or ZEROS:
                scale = low_half(word, SCALE_BF16)[:, None]
            else:
                scale = (low_half(word, SCALE_BF16) if field % 2 == 0 else high_half(word, SCALE_BF16))[:, None]
        codes = unpack(tile, upper, field, BITS, CODES, DTYPE, ZEROS == POINTS, INTERPRETED)
        values = codes.to(tl.float32) * scale
        if ZEROS == CENTRES:
            values += upper.to(tl.float32)
        if FACTORS:
            factor = tl.load(factors + expert * N + n, mask=n < N, other=0.0)
            values *= factor[:, None]
        k = plane * PLANE + j
        inside = (n < N)[:, None] if EVEN_K else (n < N)[:, None] & (k < K)[None, :]
        tl.store(y_rows + k[None, :], values.to(DTYPE), mask=inside)


def dequantize(weight: PackedIntWeight) -> torch.Tensor:
    w = weight
    lead = w.words.shape[:-4]
    y = torch.empty(*lead, w.outputs, w.inputs, dtype=w.dtype, device=w.words.device)
    panels = w.words.shape[-4]
    some = min(4, triton.next_power_of_2(panels))
    _dequantize_kernel[(w.num_chunks, triton.cdiv(panels, some), lead.numel())](
        w.words, w.scales, w.factors, y, w.inputs, w.outputs, panels, w.num_chunks,
        DTYPE=tl.bfloat16 if w.dtype is torch.bfloat16 else tl.float16, PANELS=some, num_warps=4, **layout_flags(w),
    )  # fmt: skip
    return y
