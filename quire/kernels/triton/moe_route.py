"""Routing of rows to experts: the router's product, top-k and weights.

An expert's rank is the number of experts before it, found by comparing all with all: one reduction, where selecting the
maximum k times would be k in sequence.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.dispatch import early_launch
from quire.kernels.moe_table import MAX_EXPERTS, MAX_FUSED_ROWS
from quire.kernels.rms_norm import RMSNormParams
from quire.kernels.workspace import SharedWorkspace

TILE = 8192  # weights of the router that a program holds in registers
COMPARED = 4096  # pairs of experts that a program compares at a time


@triton.jit
def _numbers(at, inside):
    """Logits, with inf for NaN: the chosen experts exist even for a row with NaN, and its weights are NaN."""
    read = tl.load(at, mask=inside, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
    return tl.where(read == read, read, float("inf"))


@triton.jit
def _choose(
    logits,  # [E], of one row
    weights,  # [TOP_K]
    experts,  # [TOP_K]
    places,  # [TOP_K]: its index among its expert's pairs
    counts,  # [E]: pairs of each expert so far
    E,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    OF_CHOSEN: tl.constexpr,
    COUNT: tl.constexpr,
):
    e = tl.arange(0, BLOCK_E)
    mine = _numbers(logits + e, e < E)
    rank = tl.zeros([BLOCK_E], tl.int32)
    for start in tl.range(0, E, CHUNK):
        o = start + tl.arange(0, CHUNK)
        other = _numbers(logits + o, o < E)
        before = (other[None, :] > mine[:, None]) | ((other[None, :] == mine[:, None]) & (o[None, :] < e[:, None]))
        rank += tl.sum((before & (o < E)[None, :]).to(tl.int32), 1)
    chosen = (rank < TOP_K) & (e < E)
    share = tl.where(e < E, tl.exp(mine - tl.max(mine, 0)), 0.0)
    # The softmax over the chosen experts is the softmax over all, divided by their sum.
    total = tl.sum(tl.where(chosen, share, 0.0), 0) if OF_CHOSEN else tl.sum(share, 0)
    tl.store(weights + rank, share / total, mask=chosen)
    tl.store(experts + rank, e, mask=chosen)
    if COUNT:
        # In any order: it decides the row in an expert's matrix, but not one bit of the result.
        place = tl.atomic_add(counts + e, tl.full([BLOCK_E], 1, tl.int32), mask=chosen, sem="relaxed")
        tl.store(places + rank, place, mask=chosen)


@triton.jit
def _route_kernel(
    logits,  # [N, E]
    weights,  # [N, TOP_K] float32
    experts,  # [N, TOP_K] int32
    places,  # [N, TOP_K] int32
    counts,  # [MAX_EXPERTS] int32: zero before
    E,
    stride,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    OF_CHOSEN: tl.constexpr,
    COUNT: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    to = row * TOP_K
    _choose(
        logits + row * stride, weights + to, experts + to, places + to, counts, E,
        TOP_K, BLOCK_E, CHUNK, OF_CHOSEN, COUNT,
    )  # fmt: skip


@triton.jit
def _router_kernel(
    x,  # [N, H]
    norm_weight,  # [H] of an RMSNorm of x
    router,  # [E, H]
    bias,  # [E]
    logits,  # [N, E] float32
    arrived,  # [MAX_FUSED_ROWS] int32: zero before and after
    weights,  # [N, TOP_K] float32
    experts,  # [N, TOP_K] int32
    normed,  # [N, H]
    E,
    H,
    x_stride,
    eps,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    OF_CHOSEN: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KEEPS_NORMED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    h = tl.arange(0, BLOCK_H)
    inside = h < H
    at = router + tl.minimum(e, E - 1).to(tl.int64)[:, None] * H + h[None, :]
    tile = tl.load(at, mask=inside[None, :], other=0.0).to(tl.float32)
    gain = (
        tl.load(norm_weight + h, mask=inside, other=0.0).to(tl.float32) if HAS_NORM else tl.zeros([BLOCK_H], tl.float32)
    )
    if PDL:
        gdc_wait()
    values = tl.load(x + row * x_stride + h, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        values *= tl.rsqrt(tl.sum(values * values, 0) / H + eps) * gain
    if KEEPS_NORMED and tl.program_id(1) == 0:
        tl.store(normed + row * H + h, values.to(normed.dtype.element_ty), mask=inside)
    found = tl.sum(tile * values[None, :], 1)
    if HAS_BIAS:
        found += tl.load(bias + e, mask=e < E, other=0.0).to(tl.float32)
    tl.store(logits + row * E + e, found, mask=e < E)
    # Every thread's part must be written before one thread counts it as arrived.
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") != tl.num_programs(1) - 1:
        return
    tl.store(arrived + row, 0)
    to = row * TOP_K
    _choose(
        logits + row * E, weights + to, experts + to, experts, experts, E,
        TOP_K, BLOCK_E, CHUNK, OF_CHOSEN, False,
    )  # fmt: skip


class RouteWorkspace(SharedWorkspace):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.counts = self.new_counters(MAX_EXPERTS)
        self.arrived = self.new_counters(MAX_FUSED_ROWS)


def route(
    logits: torch.Tensor, top_k: int, of_chosen: bool, count: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Weights, experts and, if they are counted in the workspace, places: all [N, top_k]."""
    rows, num_experts = logits.shape
    weights, experts = _new(rows, top_k, logits.device)
    places = torch.empty_like(experts) if count else None
    if rows:
        block = triton.next_power_of_2(num_experts)
        counts = RouteWorkspace.of(logits.device).counts
        _route_kernel[(rows,)](
            logits, weights, experts, places if places is not None else experts, counts, num_experts,
            logits.stride(0), TOP_K=top_k, BLOCK_E=block, CHUNK=_chunk(block), OF_CHOSEN=of_chosen,
            COUNT=count, num_warps=4 if block > 32 else 1, **early_launch(logits),
        )  # fmt: skip
    return weights, experts, places


def router(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: RMSNormParams | None,
    top_k: int,
    of_chosen: bool,
    normed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """route() of x's product with the router's weight, in one kernel, which keeps the normed x if asked."""
    rows, hidden = x.shape
    assert rows <= MAX_FUSED_ROWS
    num_experts = weight.shape[0]
    weights, experts = _new(rows, top_k, x.device)
    logits = torch.empty(rows, num_experts, dtype=torch.float32, device=x.device)
    block, block_h = triton.next_power_of_2(num_experts), triton.next_power_of_2(hidden)
    block_n = max(1, TILE // block_h)
    gain, eps = norm if norm is not None else (None, 0.0)
    _router_kernel[(rows, triton.cdiv(num_experts, block_n))](
        x, gain, weight, bias, logits, RouteWorkspace.of(x.device).arrived, weights, experts, normed,
        num_experts, hidden, x.stride(0), eps, TOP_K=top_k, BLOCK_E=block, CHUNK=_chunk(block), BLOCK_N=block_n,
        BLOCK_H=block_h, OF_CHOSEN=of_chosen, HAS_NORM=norm is not None, HAS_BIAS=bias is not None,
        KEEPS_NORMED=normed is not None, num_warps=4, **early_launch(x),
    )  # fmt: skip
    return weights, experts


def _chunk(block: int) -> int:
    return min(block, max(8, COMPARED // block))


def _new(rows: int, top_k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=device)
    return weights, torch.empty(rows, top_k, dtype=torch.int32, device=device)
