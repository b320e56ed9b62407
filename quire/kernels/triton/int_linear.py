"""y = x W^T with W in 4 or 8 bits (layout: quire/kernels/int_linear.py), for up to some hundred rows.

Words go through shared memory into the registers of the left operand of a matrix instruction and become numbers there:
for 4 bits a shift, a mask and a sum for two weights, so that reading W is the limit. Each field of the words is a
product of its own with the inputs it holds, whose sum is scaled once per output: the scales never touch the weights.
Codes of 4-bit floats become numbers in the same place; the flag CODES says which kind they are: "mxfp4" and "nvfp4" are
e2m1 with scales of bytes. Where a plane has several groups, few rows are multiplied group by group nevertheless in one
product: a row is several columns, each with the inputs of one group and zeros, of which the smallest instruction has
eight anyway. For more rows a step reads the inputs of one group.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.dispatch import INTERPRETED
from quire.kernels.int_linear import PANEL, PackedIntWeight
from quire.kernels.int_table import MAX_BLOCK_M, MIN_BLOCK_M, IntConfig
from quire.kernels.rms_norm import RMSNormParams
from quire.kernels.skinny_table import MAX_FUSED_ROWS
from quire.kernels.triton.int_unpack import (
    CENTRES,
    POINTS,
    byte_scale,
    high_half,
    low_half,
    scale_and_add_pairs,
    scale_pairs,
    scale_word,
    unpack,
)
from quire.kernels.triton.skinny_linear import COUNTERS, WORKSPACE_FLOATS, SplitWorkspace, epilogue

MAX_SHARED = 220 << 10
PREFETCHED = 4  # chunks that a program prefetches before the kernel before has ended
NORM_BLOCK = 4096  # inputs that a program squares at a time
MAX_COLUMNS = 32  # of few rows times groups of a plane


@triton.jit
def _scaled_dot(
    acc, tile, right, word, channel, FIELD: tl.constexpr, BITS: tl.constexpr, CODES: tl.constexpr,
    DTYPE: tl.constexpr, ZEROS: tl.constexpr, PER_CHANNEL: tl.constexpr, SCALE_BF16: tl.constexpr,
    PRESCALED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """acc plus the product with one field; `word` [rows] has its scale, `channel` [rows] the output's. With several
    groups in a plane `word` is [rows, columns]."""
    of = channel if PER_CHANNEL else word
    upper = (of >> 16).to(tl.int16).to(DTYPE, bitcast=True)[:, None] if ZEROS else tile
    left = unpack(tile, upper, FIELD, BITS, CODES, DTYPE, ZEROS == POINTS, INTERPRETED)
    if ZEROS == CENTRES:
        return tl.dot(scale_and_add_pairs(left, low_half(word, SCALE_BF16), upper, DTYPE, INTERPRETED), right, acc)
    if PER_CHANNEL:
        made = tl.dot(left, right, acc)
    elif len(word.shape) == 2:
        made = acc + tl.dot(left, right) * byte_scale(word, FIELD, CODES)
    else:
        if CODES == "mxfp4" or CODES == "nvfp4":
            scale = byte_scale(word, FIELD, CODES)
        else:
            scale = low_half(word, SCALE_BF16) if ZEROS or FIELD % 2 == 0 else high_half(word, SCALE_BF16)
        if PRESCALED:
            made = tl.dot(scale_pairs(left, scale, DTYPE, INTERPRETED), right, acc)
        else:
            made = acc + tl.dot(left, right) * scale[:, None]
    return made


@triton.jit
def multiply(
    x_rows,  # [1, BLOCK_M] pointers to rows of x
    in_m,  # [1, BLOCK_M]
    gain,  # [K] of an RMSNorm of x, without its factor
    words,  # [BLOCK_N, 1] pointers to the outputs' first words
    scales,  # [BLOCK_N] pointers to the outputs' first scales
    factors,  # [BLOCK_N] pointers to the outputs' factors, with FACTORS
    up_words,  # with UP: from a word of the first half to that of the second,
    up_scales,  # from a scale,
    up_factors,  # and from a factor
    begin,  # chunks
    end,
    K,
    scale_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PLANE: tl.constexpr,
    BITS: tl.constexpr,
    COUNT: tl.constexpr,
    CODES: tl.constexpr,
    ZEROS: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    SCALE_BF16: tl.constexpr,
    FACTORS: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    UP: tl.constexpr,
    SUB: tl.constexpr,  # inputs of a plane that are read at a time: with many rows these take most of the space
    PRESCALED: tl.constexpr,  # scales on the weights: rounds once more, but with many rows there are fewer of them
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The products with outputs and, with UP, with those of the second half: [BLOCK_N, BLOCK_M] float32 each."""
    FIELDS: tl.constexpr = 16 // BITS
    BYTES: tl.constexpr = CODES == "mxfp4" or CODES == "nvfp4"
    GROUP: tl.constexpr = PLANE // COUNT if BYTES else PLANE
    COLUMNS: tl.constexpr = BYTES and COUNT > 1 and SUB == PLANE
    DTYPE: tl.constexpr = x_rows.dtype.element_ty
    STEPS: tl.constexpr = PLANE // SUB
    j = tl.arange(0, SUB)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_up = acc
    channel = tl.load(scales) if PER_CHANNEL else tl.zeros([BLOCK_N], tl.int32)
    channel_up = tl.load(scales + up_scales) if PER_CHANNEL and UP else channel
    word, word_up = channel, channel
    keep = in_m
    if COLUMNS:
        word = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
        word_up = word
        part = tl.arange(0, BLOCK_M) % COUNT
        keep = in_m & ((j // GROUP)[:, None] == part[None, :])
    for step in tl.range(begin * STEPS, end * STEPS, num_stages=STAGES):
        chunk = step // STEPS
        inputs = (step % STEPS) * SUB + j
        at = words + chunk * (16 * PLANE) + inputs[None, :]
        tile = tl.load(at, eviction_policy="evict_first")
        tile_up = tl.load(at + up_words, eviction_policy="evict_first") if UP else tile
        if BYTES:
            if COLUMNS:
                at_scale = scales[:, None] + chunk * scale_stride + part[None, :]
            else:
                at_scale = scales + chunk * scale_stride + (step % STEPS) * SUB // GROUP
            word = tl.load(at_scale)
            word_up = tl.load(at_scale + up_scales) if UP else word
        elif not PER_CHANNEL:
            at_scale = scales[:, None] + chunk * scale_stride + tl.arange(0, COUNT)[None, :]
            some_scales = tl.load(at_scale)
            some_scales_up = tl.load(at_scale + up_scales) if UP else some_scales
        for field in tl.static_range(FIELDS):
            plane = chunk * FIELDS + field
            k = plane * PLANE + inputs
            if EVEN_K:
                right = tl.load(x_rows + k[:, None], mask=keep, other=0.0)
            else:
                right = tl.load(x_rows + k[:, None], mask=keep & (k < K)[:, None], other=0.0)
            if HAS_NORM:
                by = tl.load(gain + k) if EVEN_K else tl.load(gain + k, mask=k < K, other=0.0)
                right = (right.to(tl.float32) * by.to(tl.float32)[:, None]).to(DTYPE)
            if not PER_CHANNEL and not BYTES:
                word = scale_word(some_scales, field, COUNT, ZEROS)
                word_up = scale_word(some_scales_up, field, COUNT, ZEROS) if UP else word
            acc = _scaled_dot(
                acc, tile, right, word, channel, field, BITS, CODES, DTYPE, ZEROS, PER_CHANNEL, SCALE_BF16, PRESCALED,
                INTERPRETED,
            )  # fmt: skip
            if UP:
                acc_up = _scaled_dot(
                    acc_up, tile_up, right, word_up, channel_up, field, BITS, CODES, DTYPE, ZEROS, PER_CHANNEL,
                    SCALE_BF16, PRESCALED, INTERPRETED,
                )  # fmt: skip
    if PER_CHANNEL:
        acc *= low_half(channel, SCALE_BF16)[:, None]
        if UP:
            acc_up *= low_half(channel_up, SCALE_BF16)[:, None]
    if FACTORS:
        acc *= tl.load(factors)[:, None]
        if UP:
            acc_up *= tl.load(factors + up_factors)[:, None]
    return acc, acc_up


@triton.jit
def word_rows(words, n, chunks, PLANE: tl.constexpr):
    """Pointers to the first words of outputs n, [len(n), 1]."""
    return words + ((n // 16).to(tl.int64) * (chunks * 16 * PLANE) + (n % 16) * PLANE)[:, None]


@triton.jit
def prefetch(rows, begin, chunks, PLANE: tl.constexpr, CHUNKS: tl.constexpr):
    """Prefetch the first words of each output of a tile; the pieces of a chunk are 16 * PLANE words apart."""
    LINES: tl.constexpr = PLANE // 64 if PLANE > 64 else 1
    line = tl.arange(0, LINES) * 64
    for chunk in tl.static_range(CHUNKS):
        at = rows + tl.minimum(begin + chunk, chunks - 1) * (16 * PLANE) + line[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def inverse_norms(x, first, rows, K, x_stride, eps, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The RMSNorm's factor of each row, [BLOCK_M], for rows `first` to `first + ROWS`."""
    m = tl.arange(0, BLOCK_M)
    factors = tl.zeros([BLOCK_M], tl.float32)
    for row in tl.static_range(ROWS):
        at = x + tl.minimum(first + row, rows - 1).to(tl.int64) * x_stride
        squares = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, K, BLOCK):
            k = start + tl.arange(0, BLOCK)
            values = tl.load(at + k, mask=k < K, other=0.0).to(tl.float32)
            squares += values * values
        factors = tl.where(m == row, tl.rsqrt(tl.sum(squares, 0) / K + eps), factors)
    return factors


@triton.jit
def share_sums(acc, acc_up, partial, arrived, tile, split, splits, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
               UP: tl.constexpr):  # fmt: skip
    """Adds up the splits' sums of a tile. Returns whether this program came last and has them."""
    HALVES: tl.constexpr = 2 if UP else 1
    SIZE: tl.constexpr = BLOCK_N * BLOCK_M
    place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    sums = partial + tile * splits * (HALVES * SIZE) + place
    tl.store(sums + split * (HALVES * SIZE), acc)
    if UP:
        tl.store(sums + split * (HALVES * SIZE) + SIZE, acc_up)
    # Every thread's part must be written before one thread counts it as arrived.
    tl.debug_barrier()
    is_last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == splits - 1
    if is_last:
        tl.store(arrived + tile, 0)
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        acc_up = acc
        for other in tl.range(splits):  # in order, whichever program came last: the same bits every time
            acc += tl.load(sums + other * (HALVES * SIZE), cache_modifier=".cg")
            if UP:
                acc_up += tl.load(sums + other * (HALVES * SIZE) + SIZE, cache_modifier=".cg")
    return acc, acc_up, is_last


@triton.jit(do_not_specialize=["rows", "splits"])
def _linear_kernel(
    x,  # [rows, K]
    words,  # [N / 16, chunks, 16, PLANE], with SILU 2 * N outputs
    scales,  # [chunks or 1, N, COUNT]
    factors,  # [N] float32
    y,  # [rows, N]
    bias,
    residual,
    gain,
    partial,  # [tiles, splits, halves, BLOCK_N, BLOCK_M] float32
    arrived,  # [tiles] int32: zero before and after
    rows,
    splits,
    K,
    N,
    chunks,
    scale_stride,
    x_stride,
    eps,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,  # with HAS_NORM: the rows, rounded up to a power of two
    SPLIT: tl.constexpr,  # whether splits > 1
    NORM_BLOCK: tl.constexpr,
    PLANE: tl.constexpr,
    BITS: tl.constexpr,
    COUNT: tl.constexpr,
    CODES: tl.constexpr,
    ZEROS: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    SCALE_BF16: tl.constexpr,
    FACTORS: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    SILU: tl.constexpr,
    SUB: tl.constexpr,
    PRESCALED: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCHED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    # Programs of the same weights are neighbours: the second one hits the cache.
    m_tile, n_tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # Columns of a row, each of one group of a plane; see `multiply`.
    EACH: tl.constexpr = COUNT if (CODES == "mxfp4" or CODES == "nvfp4") and SUB == PLANE else 1
    TILE_M: tl.constexpr = BLOCK_M // EACH
    m = m_tile * TILE_M + tl.arange(0, TILE_M)
    of_column = m if EACH == 1 else m_tile * TILE_M + tl.arange(0, BLOCK_M) // EACH
    steps = tl.cdiv(chunks, splits)
    begin = split * steps
    end = tl.minimum(begin + steps, chunks)
    # Columns past the end read the last one again: cheaper than a mask, and never stored.
    inside_n = tl.minimum(n, N - 1)
    w_rows = word_rows(words, inside_n, chunks, PLANE)
    up_words = (N // 16).to(tl.int64) * (chunks * 16 * PLANE)
    if PDL:
        gdc_launch_dependents()
        prefetch(w_rows, begin, chunks, PLANE, PREFETCHED)
        if SILU:
            prefetch(w_rows + up_words, begin, chunks, PLANE, PREFETCHED)
        gdc_wait()
    x_rows = x + tl.minimum(of_column, rows - 1).to(tl.int64)[None, :] * x_stride
    acc, acc_up = multiply(
        x_rows, (of_column < rows)[None, :], gain, w_rows, scales + inside_n * COUNT,
        factors + inside_n if FACTORS else None, up_words, N * COUNT, N, begin, end, K, scale_stride,
        BLOCK_M, BLOCK_N, PLANE, BITS, COUNT, CODES, ZEROS, PER_CHANNEL, SCALE_BF16, FACTORS, EVEN_K, HAS_NORM, SILU,
        SUB, PRESCALED, STAGES, INTERPRETED,
    )  # fmt: skip
    if EACH > 1:
        acc = tl.sum(tl.reshape(acc, [BLOCK_N, TILE_M, EACH]), 2)
        acc_up = tl.sum(tl.reshape(acc_up, [BLOCK_N, TILE_M, EACH]), 2) if SILU else acc
    if SPLIT:
        tile = n_tile * tl.num_programs(0) + m_tile
        acc, acc_up, is_last = share_sums(acc, acc_up, partial, arrived, tile, split, splits, TILE_M, BLOCK_N, SILU)
        if not is_last:
            return
    if HAS_NORM:
        # One number per row, so it is applied to the sum: after the loop, which need not wait for it.
        factor = inverse_norms(x, m_tile * TILE_M, rows, K, x_stride, eps, TILE_M, ROWS, NORM_BLOCK)[None, :]
        acc *= factor
        acc_up *= factor
    epilogue(
        acc, acc_up, acc, acc_up, n[:, None], m[None, :], (m < rows)[None, :], y, bias, residual, None, None, N,
        HAS_BIAS, HAS_RESIDUAL, False, False, SILU, False,
    )  # fmt: skip


def layout_flags(w: PackedIntWeight) -> dict[str, Any]:
    """Arguments of a kernel that describe how the weight is packed."""
    return {
        "PLANE": w.plane,
        "BITS": w.bits,
        "COUNT": w.scales.shape[-1],
        "CODES": {torch.uint8: "mxfp4", torch.float8_e4m3fn: "nvfp4"}.get(w.scale_dtype, w.kind),
        "ZEROS": CENTRES.value if w.has_centres else POINTS.value if w.has_zeros else 0,
        "PER_CHANNEL": w.per_channel,
        "SCALE_BF16": w.scale_dtype is torch.bfloat16,
        "FACTORS": w.factors is not None,
        "EVEN_K": w.inputs == w.num_chunks * w.fields * w.plane,
        "INTERPRETED": INTERPRETED,
    }


def stages_for(
    w: PackedIntWeight, config_stages: int, block_n: int, block_m: int, halves: int, sub: int | None = None
) -> int:
    """As many of the config's as shared memory holds."""
    scales = block_m if w.parts > 1 and (sub or w.plane) == w.plane else w.fields
    step = (halves * block_n + w.fields * block_m) * (sub or w.plane) * 2 + halves * scales * block_n * 4
    return max(1, min(config_stages, MAX_SHARED // step))


def int_linear(
    x: torch.Tensor,
    weight: PackedIntWeight,
    config: IntConfig,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm: RMSNormParams | None,
    silu: bool,
    pdl: bool,
) -> torch.Tensor:
    rows, k = x.shape
    n = weight.outputs // 2 if silu else weight.outputs
    assert k == weight.inputs and x.dtype is weight.dtype and (not silu or n % PANEL == 0)
    assert norm is None or rows <= MAX_FUSED_ROWS
    y = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    block_m = config.block_m or min(MAX_BLOCK_M, triton.next_power_of_2(max(rows, MIN_BLOCK_M)))
    halves = 2 if silu else 1
    sub, prescaled, each = min(config.sub or weight.plane, weight.plane), config.prescaled, 1
    if weight.parts > 1:
        if weight.parts * triton.next_power_of_2(rows) <= MAX_COLUMNS:
            sub, prescaled, each = weight.plane, False, weight.parts
            block_m = max(MIN_BLOCK_M, each * triton.next_power_of_2(rows))
        else:
            sub = min(sub, weight.plane // weight.parts)
    stages = stages_for(weight, config.stages, config.block_n, block_m, halves, sub)
    grid = (triton.cdiv(rows, block_m // each), triton.cdiv(n, config.block_n), config.splits)
    space = SplitWorkspace.of(x.device)
    if config.splits > 1:
        tiles = grid[0] * grid[1]
        needed = tiles * config.splits * halves * config.block_n * (block_m // each)
        if needed > WORKSPACE_FLOATS or tiles > COUNTERS:
            raise ValueError(f"{config} needs {needed} floats for {rows} rows of {n}; there are {WORKSPACE_FLOATS}")
    gain, eps = norm if norm is not None else (None, 0.0)
    chunks = weight.num_chunks
    _linear_kernel[grid](
        x, weight.words, weight.scales, weight.factors, y, bias, residual, gain, space.partial, space.arrived,
        rows, config.splits, k, n, chunks, weight.scales.stride(-3), x.stride(0), eps,
        BLOCK_M=block_m, BLOCK_N=config.block_n, ROWS=triton.next_power_of_2(rows) if norm is not None else 1,
        SPLIT=config.splits > 1, NORM_BLOCK=min(NORM_BLOCK, triton.next_power_of_2(k)),
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, HAS_NORM=norm is not None, SILU=silu,
        SUB=sub, PRESCALED=prescaled, STAGES=stages,
        PREFETCHED=min(PREFETCHED, chunks // config.splits) if pdl else 0, PDL=pdl,
        num_warps=config.warps, num_stages=stages, **layout_flags(weight), **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return y
