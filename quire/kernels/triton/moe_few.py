"""The experts of few rows: without sorting, each pair of row and expert reads its expert's weights.

Two kernels, both bound by reading those weights. Programs that may share an expert's weights are neighbours, so that
the second one hits the cache.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.moe import ExpertWeights, Fp8ExpertWeights, ScaledWeight
from quire.kernels.moe_table import FewConfig, SlabConfig
from quire.kernels.rms_norm import RMSNormParams
from quire.kernels.triton.skinny_linear import scales_of

SPILL_FREE = 4096  # fp8 weights that four warps of the second kernel hold


@triton.jit
def activate(gate, up, SWIGLUOAI: tl.constexpr):
    if SWIGLUOAI:
        # Comparisons, unlike minimum and maximum, keep NaN.
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
        return gate / (1.0 + tl.exp(-1.702 * gate)) * up
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _gate_up_kernel(
    x,  # [rows, H]
    w,  # [E, 2 * D, H]
    inner,  # [rows * TOP_K, D]
    bias,  # [E, 2 * D]
    scale,  # of weights in fp8: [E * 2 * D], or [E * 2 * D / GROUP_N, H / GROUP_K]
    norm_weight,  # [H] of an RMSNorm of x
    experts,  # [rows * TOP_K]
    H,
    D,
    x_stride,
    eps,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    ONE_STEP: tl.constexpr,  # BLOCK_K covers H: no loop, and the accumulators need no registers
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    GROUP_N: tl.constexpr,  # outputs and inputs that share a scale; 0: a scale per output
    GROUP_K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    SWIGLUOAI: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        # In this order: the next kernel may start only after the previous one has written the experts.
        gdc_wait()
        gdc_launch_dependents()
    pair = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.load(experts + pair).to(tl.int64)
    x_row = x + (pair // TOP_K).to(tl.int64) * x_stride
    # Columns past the end read the last one again: cheaper than a mask, and never stored.
    gate_rows = w + (expert * 2 * D + tl.minimum(n, D - 1))[:, None] * H
    up_rows = gate_rows + D.to(tl.int64) * H
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc_up = acc
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.range(0, BLOCK_K if ONE_STEP else H, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        if EVEN_K:
            gate = tl.load(gate_rows + k[None, :], eviction_policy="evict_first").to(tl.float32)
            up = tl.load(up_rows + k[None, :], eviction_policy="evict_first").to(tl.float32)
            values = tl.load(x_row + k).to(tl.float32)
        else:
            gate = tl.load(gate_rows + k[None, :], mask=(k < H)[None, :], other=0.0).to(tl.float32)
            up = tl.load(up_rows + k[None, :], mask=(k < H)[None, :], other=0.0).to(tl.float32)
            values = tl.load(x_row + k, mask=k < H, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += values * values
            values *= tl.load(norm_weight + k, mask=k < H, other=0.0).to(tl.float32)
        if GROUP_N > 0:
            # The tile's outputs share their scales, so x is multiplied by these instead of the weights.
            row = (expert * 2 * D + tl.program_id(1) * BLOCK_N) // GROUP_N
            acc += gate * (values * scales_of(scale, row, start, H, BLOCK_K, GROUP_K))[None, :]
            acc_up += up * (values * scales_of(scale, row + D // GROUP_N, start, H, BLOCK_K, GROUP_K))[None, :]
        else:
            acc += gate * values[None, :]
            acc_up += up * values[None, :]
    total, total_up = tl.sum(acc, 1), tl.sum(acc_up, 1)
    if HAS_NORM:
        # The norm's factor is one number per row, so it is applied to the sum.
        factor = tl.rsqrt(tl.sum(squares, 0) / H + eps)
        total *= factor
        total_up *= factor
    if HAS_SCALE and GROUP_N == 0:
        scales = scale + expert * 2 * D + n
        total *= tl.load(scales, mask=n < D, other=0.0)
        total_up *= tl.load(scales + D, mask=n < D, other=0.0)
    if HAS_BIAS:
        added = bias + expert * 2 * D + n
        total += tl.load(added, mask=n < D, other=0.0).to(tl.float32)
        total_up += tl.load(added + D, mask=n < D, other=0.0).to(tl.float32)
    made = activate(total, total_up, SWIGLUOAI)
    tl.store(inner + pair.to(tl.int64) * D + n, made.to(inner.dtype.element_ty), mask=n < D)


@triton.jit
def _down_kernel(
    inner,  # [rows * TOP_K, D]
    w,  # [E, H, D]
    y,  # [rows, H]
    bias,  # [E, H]
    scale,  # of weights in fp8: [E * H], or [E * H / GROUP_N, D / GROUP_K]
    residual,  # [rows, H]
    weights,  # [rows * TOP_K] float32
    experts,  # [rows * TOP_K]
    H,
    D,
    TOP_K: tl.constexpr,
    BLOCK_J: tl.constexpr,  # TOP_K, rounded up to a power of two
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    ONE_STEP: tl.constexpr,
    EVEN: tl.constexpr,  # neither TOP_K nor D needs a mask
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, BLOCK_J)
    pair = row * TOP_K + tl.minimum(j, TOP_K - 1)
    # All experts of the row at once: their weights are being loaded before the kernel that writes `inner` has ended.
    expert = tl.load(experts + pair, cache_modifier=".cg").to(tl.int64)
    w_rows = w + (expert[:, None] * H + tl.minimum(n, H - 1)[None, :])[:, :, None] * D
    inner_rows = inner + pair.to(tl.int64)[:, None] * D
    acc = tl.zeros([BLOCK_J, BLOCK_N, BLOCK_K], tl.float32)
    if PDL and STAGES > 1:
        # A pipelined loop issues its first loads before everything in it, a wait included.
        gdc_wait()
    for start in tl.range(0, BLOCK_K if ONE_STEP else D, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        if EVEN:
            tile = tl.load(w_rows + k[None, None, :], eviction_policy="evict_first").to(tl.float32)
        else:
            inside = (j < TOP_K)[:, None, None] & (k < D)[None, None, :]
            tile = tl.load(w_rows + k[None, None, :], mask=inside, other=0.0).to(tl.float32)
        if PDL and STAGES == 1:
            gdc_wait()
        values = tl.load(inner_rows + k[None, :], mask=(k < D)[None, :], other=0.0).to(tl.float32)
        if GROUP_N > 0:
            GROUPS: tl.constexpr = BLOCK_K // GROUP_K
            group = start // GROUP_K + tl.arange(0, GROUPS)
            first = (expert * H + tl.program_id(1) * BLOCK_N) // GROUP_N * (D // GROUP_K)
            inside_k = (group < D // GROUP_K)[None, :]
            by_group = tl.load(scale + first[:, None] + group[None, :], mask=inside_k, other=0.0)
            repeated = tl.broadcast_to(by_group[:, :, None], [BLOCK_J, GROUPS, GROUP_K])
            values *= tl.reshape(repeated, [BLOCK_J, BLOCK_K])
        acc += tile * values[:, None, :]
    total = tl.sum(acc, 2)
    if HAS_SCALE and GROUP_N == 0:
        total *= tl.load(scale + expert[:, None] * H + n[None, :], mask=(n < H)[None, :], other=0.0)
    if HAS_BIAS:
        added = bias + expert[:, None] * H + n[None, :]
        total += tl.load(added, mask=(n < H)[None, :], other=0.0).to(tl.float32)
    share = tl.load(weights + pair, mask=j < TOP_K, other=0.0, cache_modifier=".cg")
    made = tl.sum(total * share[:, None], 0)
    at = row.to(tl.int64) * H + n
    if HAS_RESIDUAL:
        made += tl.load(residual + at, mask=n < H, other=0.0).to(tl.float32)
    tl.store(y + at, made.to(y.dtype.element_ty), mask=n < H)


def few_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    w: ExpertWeights | Fp8ExpertWeights,
    config: FewConfig,
    norm: RMSNormParams | None,
    residual: torch.Tensor | None,
    pdl: bool,
) -> torch.Tensor:
    rows, top_k = experts.shape
    _, hidden, width = w.sizes
    inner = torch.empty(rows * top_k, width, dtype=x.dtype, device=x.device)
    y = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    launch = {"launch_pdl": True} if pdl else {}
    gain, eps = norm if norm is not None else (None, 0.0)
    first, second = config.gate_up, config.down
    gate_up, of_gate_up, first = _scaled(w.gate_up, first)
    if isinstance(w, Fp8ExpertWeights):
        # A thread loads twice the weights of bfloat16 at once, and more sums would spill.
        each = SPILL_FREE // (triton.next_power_of_2(top_k) * second.block_k)
        second = replace(second, block_n=max(1, min(second.block_n, each)), warps=4)
    down, of_down, second = _scaled(w.down, second)
    _gate_up_kernel[(rows * top_k, triton.cdiv(width, first.block_n))](
        x, gate_up, inner, w.gate_up_bias, of_gate_up.pop("scale"), gain, experts, hidden, width, x.stride(0), eps,
        TOP_K=top_k, BLOCK_N=first.block_n, BLOCK_K=first.block_k, STAGES=first.stages,
        ONE_STEP=hidden <= first.block_k, EVEN_K=hidden % first.block_k == 0, HAS_BIAS=w.gate_up_bias is not None,
        HAS_NORM=norm is not None, SWIGLUOAI=w.activation == "swigluoai", PDL=pdl, num_warps=first.warps,
        num_stages=first.stages, **of_gate_up, **launch,
    )  # fmt: skip
    block_j = triton.next_power_of_2(top_k)
    _down_kernel[(rows, triton.cdiv(hidden, second.block_n))](
        inner, down, y, w.down_bias, of_down.pop("scale"), residual, weights, experts, hidden, width,
        TOP_K=top_k, BLOCK_J=block_j, BLOCK_N=second.block_n, BLOCK_K=second.block_k, STAGES=second.stages,
        ONE_STEP=width <= second.block_k, EVEN=width % second.block_k == 0 and block_j == top_k,
        HAS_BIAS=w.down_bias is not None, HAS_RESIDUAL=residual is not None, PDL=pdl, num_warps=second.warps,
        num_stages=second.stages, **of_down, **launch,
    )  # fmt: skip
    return y


def _scaled(weight: torch.Tensor | ScaledWeight, config: SlabConfig) -> tuple[torch.Tensor, dict[str, Any], SlabConfig]:
    """A weight, its scales for a kernel, and tiles that are within groups of these."""
    if isinstance(weight, torch.Tensor):
        return weight, {"scale": None, "HAS_SCALE": False, "GROUP_N": 0, "GROUP_K": 0}, config
    group_n, group_k = weight.groups or (0, 0)
    if group_n:
        config = replace(config, block_n=min(config.block_n, group_n), block_k=max(config.block_k, group_k))
    return weight.data, {"scale": weight.scale, "HAS_SCALE": True, "GROUP_N": group_n, "GROUP_K": group_k}, config
