"""Experts in 4 or 8 bits: the two ways of moe_few.py and moe_grouped.py with the products of int_linear.py.

Of few rows each pair of row and expert is a product of its own. The sum over a row's experts is shared like the splits
of a linear layer, so that all of them are read at once.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.int_linear import PANEL, PackedIntWeight
from quire.kernels.int_table import MIN_BLOCK_M
from quire.kernels.moe import IntExpertWeights
from quire.kernels.moe_table import FewConfig, TileConfig
from quire.kernels.triton.int_linear import (
    PREFETCHED,
    layout_flags,
    multiply,
    prefetch,
    share_sums,
    stages_for,
    word_rows,
)
from quire.kernels.triton.moe_few import activate
from quire.kernels.triton.skinny_linear import COUNTERS, WORKSPACE_FLOATS, SplitWorkspace

MANY_ROWS = 16  # of a tile, above which weights are scaled rather than sums


@triton.jit
def _few_gate_up_kernel(
    x,  # [rows, H], or [rows * TOP_K, H]
    words,  # [E, 2 * D / 16, chunks, 16, PLANE]
    scales,  # [E, chunks or 1, 2 * D, COUNT]
    factors,  # [E, 2 * D] float32
    inner,  # [rows * TOP_K, D]
    bias,  # [E, 2 * D]
    experts,  # [rows * TOP_K]
    H,
    D,
    chunks,
    words_stride,  # of experts
    scales_stride,
    scale_stride,  # of chunks
    x_stride,
    X_EACH: tl.constexpr,  # pairs of a row of x
    TOP_K: tl.constexpr,
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
    HAS_BIAS: tl.constexpr,
    SWIGLUOAI: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        # In this order: the next kernel may start only after the previous one has written the experts.
        gdc_wait()
        gdc_launch_dependents()
    pair = tl.program_id(0)
    row = pair // X_EACH
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_n = tl.minimum(n, D - 1)
    expert = tl.load(experts + pair).to(tl.int64)
    # One column of the tile is the row, or one for each group of a plane; the others are zero: the smallest matrix
    # instruction has eight.
    EACH: tl.constexpr = COUNT if CODES == "mxfp4" or CODES == "nvfp4" else 1
    m = tl.arange(0, BLOCK_M)
    x_rows = x + row.to(tl.int64) * x_stride + m[None, :] * 0
    acc, acc_up = multiply(
        x_rows, (m < EACH)[None, :], None, word_rows(words + expert * words_stride, inside_n, chunks, PLANE),
        scales + expert * scales_stride + inside_n * COUNT, factors + expert * 2 * D + inside_n if FACTORS else None,
        (D // 16).to(tl.int64) * (chunks * 16 * PLANE), D * COUNT, D, 0, chunks, H, scale_stride,
        BLOCK_M, BLOCK_N, PLANE, BITS, COUNT, CODES, ZEROS, PER_CHANNEL, SCALE_BF16, FACTORS, EVEN_K, False, True,
        PLANE, False, STAGES, INTERPRETED,
    )  # fmt: skip
    total, total_up = tl.sum(acc, 1), tl.sum(acc_up, 1)
    if HAS_BIAS:
        added = bias + expert * 2 * D + n
        total += tl.load(added, mask=n < D, other=0.0).to(tl.float32)
        total_up += tl.load(added + D, mask=n < D, other=0.0).to(tl.float32)
    made = activate(total, total_up, SWIGLUOAI)
    tl.store(inner + pair.to(tl.int64) * D + n, made.to(inner.dtype.element_ty), mask=n < D)


@triton.jit
def _few_down_kernel(
    inner,  # [rows * TOP_K, D]
    words,  # [E, H / 16, chunks, 16, PLANE]
    scales,  # [E, chunks or 1, H, COUNT]
    factors,  # [E, H] float32
    y,  # [rows, H]
    bias,  # [E, H]
    residual,  # [rows, H]
    weights,  # [rows * TOP_K] float32
    experts,  # [rows * TOP_K]
    partial,
    arrived,
    H,
    D,
    chunks,
    words_stride,
    scales_stride,
    scale_stride,
    TOP_K: tl.constexpr,
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
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCHED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    row, n_tile, chosen = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    pair = row * TOP_K + chosen
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_n = tl.minimum(n, H - 1)
    expert = tl.load(experts + pair, cache_modifier=".cg").to(tl.int64)
    w_rows = word_rows(words + expert * words_stride, inside_n, chunks, PLANE)
    if PDL:
        gdc_launch_dependents()
        prefetch(w_rows, 0, chunks, PLANE, PREFETCHED)
        gdc_wait()
    EACH: tl.constexpr = COUNT if CODES == "mxfp4" or CODES == "nvfp4" else 1
    m = tl.arange(0, BLOCK_M)
    x_rows = inner + pair.to(tl.int64) * D + m[None, :] * 0
    acc, _ = multiply(
        x_rows, (m < EACH)[None, :], None, w_rows, scales + expert * scales_stride + inside_n * COUNT,
        factors + expert * H + inside_n if FACTORS else None, 0, 0, 0, 0, chunks, D, scale_stride,
        BLOCK_M, BLOCK_N, PLANE, BITS, COUNT, CODES, ZEROS, PER_CHANNEL, SCALE_BF16, FACTORS, EVEN_K, False, False,
        PLANE, False, STAGES, INTERPRETED,
    )  # fmt: skip
    total = tl.sum(acc, 1)
    if HAS_BIAS:
        total += tl.load(bias + expert * H + n, mask=n < H, other=0.0).to(tl.float32)
    total *= tl.load(weights + pair, cache_modifier=".cg")
    tile = row * tl.num_programs(1) + n_tile
    total, _, is_last = share_sums(
        total[:, None], total[:, None], partial, arrived, tile, chosen, TOP_K, 1, BLOCK_N, False
    )
    if not is_last:
        return
    made = tl.sum(total, 1)
    at = row.to(tl.int64) * H + n
    if HAS_RESIDUAL:
        made += tl.load(residual + at, mask=n < H, other=0.0).to(tl.float32)
    tl.store(y + at, made.to(y.dtype.element_ty), mask=n < H)


@triton.jit
def _grouped_kernel(
    x,  # gate_up: [rows, K], or [rows * TOP_K, K]; down: [tiles * BLOCK_M, K]
    words,  # [E, N / 16, chunks, 16, PLANE], gate_up: 2 * N outputs
    scales,
    factors,
    y,  # gate_up: [tiles * BLOCK_M, N]; down: [pairs, N]
    bias,
    order,  # these three as in moe_grouped.py
    tile_expert,
    tile_rows,
    N,
    K,
    chunks,
    words_stride,
    scales_stride,
    scale_stride,
    x_stride,
    X_EACH: tl.constexpr,  # with GATE_UP: pairs of a row of x
    TOP_K: tl.constexpr,
    GATE_UP: tl.constexpr,  # the first product: rows are gathered, halves multiplied after an activation
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
    HAS_BIAS: tl.constexpr,
    SWIGLUOAI: tl.constexpr,
    SUB: tl.constexpr,
    PRESCALED: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    # An expert's tiles, and a tile's columns, are neighbours: both operands of the product hit the cache.
    blocks = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0) // blocks
    n = (tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    rows = tl.load(tile_rows + tile)
    if rows == 0:
        return
    expert = tl.load(tile_expert + tile).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    position = (tile * BLOCK_M + m).to(tl.int64)
    pair = tl.load(order + position, mask=m < rows, other=0).to(tl.int64)
    source = pair // X_EACH if GATE_UP else position
    inside_n = tl.minimum(n, N - 1)
    HALVES: tl.constexpr = 2 if GATE_UP else 1
    acc, acc_up = multiply(
        x + source[None, :] * x_stride, (m < rows)[None, :], None,
        word_rows(words + expert * words_stride, inside_n, chunks, PLANE),
        scales + expert * scales_stride + inside_n * COUNT,
        factors + expert * (HALVES * N) + inside_n if FACTORS else None,
        (N // 16).to(tl.int64) * (chunks * 16 * PLANE), N * COUNT, N, 0, chunks, K, scale_stride,
        BLOCK_M, BLOCK_N, PLANE, BITS, COUNT, CODES, ZEROS, PER_CHANNEL, SCALE_BF16, FACTORS, EVEN_K, False, GATE_UP,
        SUB, PRESCALED, STAGES, INTERPRETED,
    )  # fmt: skip
    if HAS_BIAS:
        added = bias + expert * (HALVES * N) + n
        acc += tl.load(added, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if GATE_UP:
            acc_up += tl.load(added + N, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if GATE_UP:
        acc = activate(acc, acc_up, SWIGLUOAI)
    to = position if GATE_UP else pair
    inside = (m < rows)[:, None] & (n < N)[None, :]
    tl.store(y + to[:, None] * N + n[None, :], tl.trans(acc.to(y.dtype.element_ty)), mask=inside)


def few_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    w: IntExpertWeights,
    config: FewConfig,
    residual: torch.Tensor | None,
    pdl: bool,
) -> torch.Tensor:
    rows, top_k = experts.shape
    _, hidden, width = w.sizes
    assert width % PANEL == 0 and x.dtype is w.down.dtype
    inner = torch.empty(rows * top_k, width, dtype=x.dtype, device=x.device)
    y = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    launch: dict[str, Any] = {"TOP_K": top_k, "PDL": pdl, "BLOCK_M": MIN_BLOCK_M}
    launch |= {"launch_pdl": True} if pdl else {}
    each = top_k
    if w.rounding is not None:
        x, each = w.rounding.rounded(x, experts)
    first, second = config.gate_up, config.down
    stages = stages_for(w.gate_up, first.stages, first.block_n, MIN_BLOCK_M, 2)
    _few_gate_up_kernel[(rows * top_k, triton.cdiv(width, first.block_n))](
        x, w.gate_up.words, w.gate_up.scales, w.gate_up.factors, inner, w.gate_up_bias, experts, hidden, width,
        *_strides(w.gate_up), x.stride(0), BLOCK_N=first.block_n, HAS_BIAS=w.gate_up_bias is not None,
        SWIGLUOAI=w.activation == "swigluoai", STAGES=stages, num_warps=first.warps,
        num_stages=stages, X_EACH=each, **launch, **layout_flags(w.gate_up),
    )  # fmt: skip
    if w.rounding is not None:
        inner = w.rounding.rounded_inner(inner, experts.flatten())
    space = SplitWorkspace.of(x.device)
    tiles = triton.cdiv(hidden, second.block_n)
    if rows * tiles * top_k * second.block_n > WORKSPACE_FLOATS or rows * tiles > COUNTERS:
        raise ValueError(f"{rows} rows are too many for the kernel of few rows; there are {WORKSPACE_FLOATS} floats")
    stages = stages_for(w.down, second.stages, second.block_n, MIN_BLOCK_M, 1)
    _few_down_kernel[(rows, tiles, top_k)](
        inner, w.down.words, w.down.scales, w.down.factors, y, w.down_bias, residual, weights, experts, space.partial,
        space.arrived, hidden, width, *_strides(w.down), BLOCK_N=second.block_n, HAS_BIAS=w.down_bias is not None,
        HAS_RESIDUAL=residual is not None, STAGES=stages, PREFETCHED=min(PREFETCHED, w.down.num_chunks) if pdl else 0,
        num_warps=second.warps, num_stages=stages, **launch, **layout_flags(w.down),
    )  # fmt: skip
    return y


def multiply_sorted(
    x: torch.Tensor,
    weight: PackedIntWeight,  # [E, outputs, inputs]
    y: torch.Tensor,
    bias: torch.Tensor | None,
    sorted_by: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    config: TileConfig,
    **flags: Any,
) -> None:
    """One of the two products of moe_grouped.py."""
    flags = {"X_EACH": flags["TOP_K"]} | flags
    n, halves = y.shape[1], 2 if flags["GATE_UP"] else 1
    assert halves == 1 or n % PANEL == 0
    is_high = flags["BLOCK_M"] > MANY_ROWS
    group = weight.plane // weight.parts
    sub = min(group, 64 if flags["BLOCK_M"] == 32 else 32) if is_high else group
    stages = stages_for(weight, config.stages, config.block_n, flags["BLOCK_M"], halves, sub)
    _grouped_kernel[(len(sorted_by[1]) * triton.cdiv(n, config.block_n),)](
        x, weight.words, weight.scales, weight.factors, y, bias, *sorted_by, n, weight.inputs, *_strides(weight),
        x.stride(0), BLOCK_N=config.block_n, HAS_BIAS=bias is not None, SUB=sub, PRESCALED=is_high, STAGES=stages,
        num_warps=config.warps, num_stages=stages, **flags, **layout_flags(weight),
    )  # fmt: skip


def _strides(weight: PackedIntWeight) -> tuple[int, int, int, int]:
    """The chunks, and the strides of experts' words and scales and of chunks' scales."""
    return weight.num_chunks, weight.words.stride(0), weight.scales.stride(0), weight.scales.stride(1)
