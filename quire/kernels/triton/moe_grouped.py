"""The experts of many rows: pairs of row and expert are sorted by expert, each expert's padded to whole tiles, and
every tile is multiplied by its expert's weights.

The host need not know the counts: there are as many programs as the worst distribution needs, and those without a tile
return at once. The weights are the left operand of the product, because the left side of a Hopper matrix instruction
has 64 rows and the right one as few as 8.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.moe import AnyExpertWeights, Fp8ExpertWeights, IntExpertWeights, ScaledWeight
from quire.kernels.moe_table import GroupedConfig, TileConfig
from quire.kernels.quantize_fp8 import Quantized, quantize_fp8
from quire.kernels.triton.int_experts import multiply_sorted
from quire.kernels.triton.moe_few import activate
from quire.kernels.triton.moe_route import RouteWorkspace

COMPARED = 4096  # pairs of (pair, expert) that a program of the sort holds in registers
COLUMNS = 1024  # that a program sums up
MIN_QUANTIZED = 64  # pairs of a tile from which rows are quantized, if weights are fp8


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _place_kernel(
    experts,  # [pairs]
    places,  # [pairs]: its index among its expert's pairs
    counts,  # [E]
    order,  # [tiles * BLOCK_M]: the pair at each position; positions past an expert's last pair are not written
    tile_expert,  # [tiles]
    tile_rows,  # [tiles]: how many positions of a tile are pairs
    pairs,
    tiles,
    E,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    e = tl.arange(0, BLOCK_E)
    count = tl.load(counts + e, mask=e < E, other=0)
    own = (count + BLOCK_M - 1) // BLOCK_M
    end = tl.cumsum(own, 0)
    first = end - own

    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts + p, mask=p < pairs, other=-1)
    place = tl.load(places + p, mask=p < pairs, other=0)
    begin = tl.sum(tl.where(expert[:, None] == e[None, :], first[None, :], 0), 1) * BLOCK_M
    tl.store(order + begin + place, p, mask=p < pairs)

    inside = (first[None, :] <= p[:, None]) & (p[:, None] < end[None, :])
    left = tl.minimum(count[None, :] - (p[:, None] - first[None, :]) * BLOCK_M, BLOCK_M)
    tl.store(tile_expert + p, tl.sum(tl.where(inside, e[None, :], 0), 1), mask=p < tiles)
    tl.store(tile_rows + p, tl.sum(tl.where(inside, left, 0), 1), mask=p < tiles)


@triton.jit(do_not_specialize=["x_scale_stride"])
def _grouped_kernel(
    x,  # gate_up: [rows, K]; down: [tiles * BLOCK_M, K]; perhaps in fp8
    w,  # gate_up: [E * 2 * N, K]; down: [E * N, K]; with TMA a descriptor of it
    y,  # gate_up: [tiles * BLOCK_M, N]; down: [pairs, N]
    bias,
    w_scale,  # of weights in fp8: one per output, or [outputs of all experts / GROUP_N, K / GROUP_K]
    x_scale,  # of x in fp8: one per row, or [K / GROUP_K, rows of x]
    order,
    tile_expert,
    tile_rows,
    N,
    K,
    x_stride,
    x_scale_stride,
    TOP_K: tl.constexpr,
    GATE_UP: tl.constexpr,  # the first product: rows are gathered, halves multiplied after an activation
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_W_SCALE: tl.constexpr,
    HAS_X_SCALE: tl.constexpr,
    GROUP_N: tl.constexpr,  # outputs and inputs that share a scale; 0: a scale per output and row
    GROUP_K: tl.constexpr,
    SWIGLUOAI: tl.constexpr,
    PDL: tl.constexpr,
):
    # An expert's tiles, and a tile's columns, are neighbours: both operands of the product hit the cache.
    blocks = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0) // blocks
    first = (tl.program_id(0) % blocks) * BLOCK_N
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    rows = tl.load(tile_rows + tile)
    if rows == 0:
        return
    expert = tl.load(tile_expert + tile)
    m = tl.arange(0, BLOCK_M)
    position = (tile * BLOCK_M + m).to(tl.int64)
    pair = tl.load(order + position, mask=m < rows, other=0).to(tl.int64)
    source = pair // TOP_K if GATE_UP else position
    x_rows = x + source[None, :] * x_stride
    HALVES: tl.constexpr = 2 if GATE_UP else 1
    base = expert * (HALVES * N) + first
    n = first + tl.arange(0, BLOCK_N)
    if not TMA:
        # Columns past the end read the last one again: cheaper than a mask, and never stored.
        inside_n = tl.minimum(n, N - 1).to(tl.int64)
        w_rows = w + (expert.to(tl.int64) * (HALVES * N) + inside_n)[:, None] * K
        up_rows = w_rows + N.to(tl.int64) * K
    if HAS_W_SCALE and GROUP_N == 0:
        scales = w_scale + expert.to(tl.int64) * (HALVES * N) + n
        scale = tl.load(scales, mask=n < N, other=0.0)
        scale_up = tl.load(scales + N, mask=n < N, other=0.0) if GATE_UP else scale
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_up = acc
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        # Positions without a pair are not read: there are more of them than pairs.
        if EVEN_K:
            right = tl.load(x_rows + k[:, None], mask=(m < rows)[None, :], other=0.0)
        else:
            right = tl.load(x_rows + k[:, None], mask=(k < K)[:, None] & (m < rows)[None, :], other=0.0)
        if TMA:
            left = w.load([base, start])
        elif EVEN_K:
            left = tl.load(w_rows + k[None, :])
        else:
            left = tl.load(w_rows + k[None, :], mask=(k < K)[None, :], other=0.0)
        if GROUP_N > 0:
            group = start // GROUP_K
            scale_at = w_scale + (base // GROUP_N).to(tl.int64) * (K // GROUP_K) + group
            by_row = tl.zeros([BLOCK_M], tl.float32) + 1.0
            if HAS_X_SCALE:
                by_row = tl.load(x_scale + group * x_scale_stride + source, mask=m < rows, other=0.0)
            acc += tl.dot(left.to(right.dtype), right) * (by_row * tl.load(scale_at))[None, :]
        elif HAS_W_SCALE and not HAS_X_SCALE:
            # Scaled here, not at the end: sums in place would keep products waiting while weights are converted.
            acc += tl.dot(left.to(right.dtype), right) * scale[:, None]
        else:
            acc = tl.dot(left, right, acc, input_precision="ieee")
        if GATE_UP:
            if TMA:
                left = w.load([base + N, start])
            elif EVEN_K:
                left = tl.load(up_rows + k[None, :])
            else:
                left = tl.load(up_rows + k[None, :], mask=(k < K)[None, :], other=0.0)
            if GROUP_N > 0:
                scale_at += N // GROUP_N * (K // GROUP_K)
                acc_up += tl.dot(left.to(right.dtype), right) * (by_row * tl.load(scale_at))[None, :]
            elif HAS_W_SCALE and not HAS_X_SCALE:
                acc_up += tl.dot(left.to(right.dtype), right) * scale_up[:, None]
            else:
                acc_up = tl.dot(left, right, acc_up, input_precision="ieee")
    if HAS_X_SCALE and GROUP_N == 0:
        by_row = tl.load(x_scale + source, mask=m < rows, other=0.0)
        acc *= by_row[None, :] * scale[:, None]
        if GATE_UP:
            acc_up *= by_row[None, :] * scale_up[:, None]
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


@triton.jit
def _combine_kernel(
    y,  # [rows * TOP_K, H]
    weights,  # [rows * TOP_K] float32
    residual,  # [rows, H]
    out,  # [rows, H]
    counts,
    E,
    H,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):  # in order: the same bits every time
        pair = row * TOP_K + j
        part = tl.load(y + pair * H + c, mask=c < H, other=0.0).to(tl.float32)
        total += part * tl.load(weights + pair)
    if HAS_RESIDUAL:
        total += tl.load(residual + row * H + c, mask=c < H, other=0.0).to(tl.float32)
    tl.store(out + row * H + c, total.to(out.dtype.element_ty), mask=c < H)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        e = tl.arange(0, BLOCK_E)
        tl.store(counts + e, tl.zeros([BLOCK_E], tl.int32), mask=e < E)  # for the next layer


def max_tiles(pairs: int, num_experts: int, block_m: int) -> int:
    """For any distribution: an expert's first tile has at least one pair, each further tile means block_m more."""
    used = min(pairs, num_experts)
    return used + (pairs - used) // block_m


def grouped_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    places: torch.Tensor,
    w: AnyExpertWeights,
    config: GroupedConfig,
    residual: torch.Tensor | None,
    pdl: bool,
) -> torch.Tensor:
    """`places` are route()'s, whose counts are reset to zero here."""
    rows, top_k = experts.shape
    num_experts, hidden, width = w.sizes
    pairs, device = rows * top_k, x.device
    block_m, block_e = config.block_m, triton.next_power_of_2(num_experts)
    tiles = max_tiles(pairs, num_experts, block_m)
    counts = RouteWorkspace.of(device).counts
    launch: dict[str, bool] = {"PDL": pdl, **({"launch_pdl": True} if pdl else {})}

    order = torch.empty(tiles * block_m, dtype=torch.int32, device=device)
    # Two tensors, so that both begin at a multiple of 16 bytes: Triton compiles other kernels for unaligned pointers.
    tile_expert, tile_rows = (torch.empty(tiles, dtype=torch.int32, device=device) for _ in range(2))
    some = max(16, COMPARED // block_e)
    _place_kernel[(triton.cdiv(max(pairs, tiles), some),)](
        experts, places, counts, order, tile_expert, tile_rows, pairs, tiles, num_experts,
        BLOCK_E=block_e, BLOCK_M=block_m, BLOCK=some, num_warps=4, **launch,
    )  # fmt: skip
    sorted_by = (order, tile_expert, tile_rows)
    inner = torch.empty(tiles * block_m, width, dtype=x.dtype, device=device)
    flags = {"TOP_K": top_k, "BLOCK_M": block_m, "SWIGLUOAI": w.activation == "swigluoai", **launch}
    multiply: Any = multiply_sorted if isinstance(w, IntExpertWeights) else _multiply
    rounding = w.rounding if isinstance(w, IntExpertWeights) else None
    if rounding is not None:
        x, flags["X_EACH"] = rounding.rounded(x, experts)
    first = _in_weights_type(x, w, w.gate_up, block_m)
    multiply(first, w.gate_up, inner, w.gate_up_bias, sorted_by, config.gate_up, GATE_UP=True, **flags)
    if rounding is not None:
        inner = rounding.rounded_inner(inner, tile_expert.repeat_interleave(block_m))
    second = _in_weights_type(inner, w, w.down, block_m)
    y = torch.empty(pairs, hidden, dtype=x.dtype, device=device)
    multiply(second, w.down, y, w.down_bias, sorted_by, config.down, GATE_UP=False, **flags)
    out = torch.empty(rows, hidden, dtype=x.dtype, device=device)
    columns = min(COLUMNS, triton.next_power_of_2(hidden))
    _combine_kernel[(rows, triton.cdiv(hidden, columns))](
        y, weights, residual, out, counts, num_experts, hidden, TOP_K=top_k, BLOCK=columns, BLOCK_E=block_e,
        HAS_RESIDUAL=residual is not None, num_warps=4, **launch,
    )  # fmt: skip
    return out


def _in_weights_type(x: torch.Tensor, w: AnyExpertWeights, weight: Any, block_m: int) -> torch.Tensor | Quantized:
    """Quantized, if experts in fp8 have many rows: else reading weights takes longer than multiplying by them.

    Positions without a pair are quantized too, whatever they hold: nobody reads them.
    """
    if not isinstance(w, Fp8ExpertWeights) or not w.quantizes or block_m < MIN_QUANTIZED:
        return x
    return quantize_fp8(x, group=weight.groups[1] if weight.groups is not None else 0)


def _multiply(
    x: torch.Tensor | Quantized,
    weight: torch.Tensor | ScaledWeight,  # [E, outputs, inputs]
    y: torch.Tensor,
    bias: torch.Tensor | None,
    sorted_by: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    config: TileConfig,
    **flags: Any,
) -> None:
    x, x_scale = (x, None) if isinstance(x, torch.Tensor) else x
    if isinstance(weight, torch.Tensor):
        data, scale, groups = weight, None, None
    else:
        data, scale, groups = weight.data, weight.scale, weight.groups
    group_n, group_k = groups or (0, 0)
    n, k, size = y.shape[1], data.shape[2], data.element_size()
    # Tables are for two bytes an element. A tile is of one group of outputs, a step of one of inputs.
    block_k = config.block_k * 2 // x.element_size()
    block_k = min(block_k, group_k) if group_k else block_k
    block_n = min(config.block_n, group_n) if group_n else config.block_n
    if group_n and flags["GATE_UP"] and flags["BLOCK_M"] > 64:
        block_n = min(block_n, 64)  # sums of one group beside those of all: more would spill
    flat = data.view(-1, k)
    has_tma, shared = _limits(x.device)
    tma = config.tma and has_tma and k * size % 16 == 0
    step = ((2 if flags["GATE_UP"] else 1) * block_n * size + flags["BLOCK_M"] * x.element_size()) * block_k
    stages = max(1, min(config.stages, shared // step))
    tiles = len(sorted_by[1])
    _grouped_kernel[(tiles * triton.cdiv(n, block_n),)](
        x, TensorDescriptor.from_tensor(flat, [block_n, block_k]) if tma else flat, y, bias, scale, x_scale, *sorted_by,
        n, k, x.stride(0), x_scale.stride(-1) if x_scale is not None and group_k else 0,
        BLOCK_N=block_n, BLOCK_K=block_k, STAGES=stages, EVEN_K=k % block_k == 0, TMA=tma,
        HAS_BIAS=bias is not None, HAS_W_SCALE=scale is not None, HAS_X_SCALE=x_scale is not None,
        GROUP_N=group_n, GROUP_K=group_k, num_warps=config.warps, num_stages=stages, **flags,
    )  # fmt: skip


@functools.cache
def _limits(device: torch.device) -> tuple[bool, int]:
    """Whether there is a tensor memory accelerator, and the bytes of shared memory for a program's tiles."""
    if device.type != "cuda":
        return True, 220 << 10
    major, minor = torch.cuda.get_device_capability(device)
    shared = 220 if major in (9, 10) else 156 if (major, minor) == (8, 0) else 92
    return major >= 9, shared << 10
