"""Routing of rows to experts: the router's product, top-k and weights.

An expert's rank is the number of experts before it, found by comparing all with all: one reduction, where selecting the
maximum k times would be k in sequence.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.dispatch import early_launch
from quire.kernels.moe_routing import GROUP_SCORES, SCORES, Routing
from quire.kernels.moe_table import MAX_EXPERTS, MAX_FUSED_ROWS
from quire.kernels.rms_norm import RMSNormParams
from quire.kernels.workspace import SharedWorkspace

TILE = 8192  # weights of the router that a program holds in registers
COMPARED = 4096  # pairs of experts that a program compares at a time


# As SCORES and GROUP_SCORES of moe_routing.py are ordered.
SIGMOID = tl.constexpr(2)
TOP2_SUM = tl.constexpr(1)


@triton.jit
def _as_inf(x):
    """inf for NaN: the chosen experts exist even for a row with NaN."""
    return tl.where(x == x, x, float("inf"))


@triton.jit
def _read(at, inside):
    return tl.load(at, mask=inside, other=float("-inf"), cache_modifier=".cg").to(tl.float32)


@triton.jit
def _score(x, SCORES: tl.constexpr):
    """A sigmoid, or the root of softplus."""
    if SCORES == SIGMOID:
        return 1.0 / (1.0 + tl.exp(-x))
    small = tl.exp(-tl.abs(x))
    more = 1.0 + small
    log1p = tl.where(more == 1.0, small, tl.log(more) * (small / (more - 1.0)))
    return tl.sqrt(tl.where(x <= 0, 0.0, x) + log1p)  # not maximum(x, 0), which would lose NaN


@triton.jit
def _choice(logits, bias, e, E, most, total, SCORES: tl.constexpr, BY_LOGITS: tl.constexpr, HAS_BIAS: tl.constexpr):
    """What experts `e` are chosen by; -inf past the last. `most` and `total` are a softmax's."""
    read = _read(logits + e, e < E)
    if BY_LOGITS:
        return _as_inf(read)
    score = tl.exp(_as_inf(read) - most) / total if SCORES < SIGMOID else _score(read, SCORES)
    if HAS_BIAS:
        score += tl.load(bias + e, mask=e < E, other=0.0)
    return tl.where(e < E, _as_inf(score), float("-inf"))


@triton.jit
def _top_groups(
    logits, bias, E, most, total,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_SCORE: tl.constexpr, BLOCK_S: tl.constexpr,
    SCORES: tl.constexpr, BY_LOGITS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Which groups, of GROUPS rounded up to a power of two, experts are chosen from; and how many experts each has."""
    BLOCK_G: tl.constexpr = triton.next_power_of_2(GROUPS)
    size = E // GROUPS
    g = tl.arange(0, BLOCK_G)
    s = tl.arange(0, BLOCK_S)
    inside = (s < size)[None, :] & (g < GROUPS)[:, None]
    e = tl.where(inside, g[:, None] * size + s[None, :], E)
    found = _choice(logits, bias, e, E, most, total, SCORES, BY_LOGITS, HAS_BIAS)
    best = tl.max(found, 1)
    if GROUP_SCORE == TOP2_SUM:
        first = tl.min(tl.where(found == best[:, None], s[None, :], BLOCK_S), 1)
        best = _as_inf(best + tl.max(tl.where(s[None, :] == first[:, None], float("-inf"), found), 1))
    before = (best[None, :] > best[:, None]) | ((best[None, :] == best[:, None]) & (g[None, :] < g[:, None]))
    rank = tl.sum((before & (g < GROUPS)[None, :]).to(tl.int32), 1)
    return (rank < TOP_GROUPS) & (g < GROUPS), size


@triton.jit
def _in_groups(e, kept, size, BLOCK_G: tl.constexpr):
    """Whether experts `e` are in groups that are kept."""
    g = tl.arange(0, BLOCK_G)
    return tl.sum((((e // size)[:, None] == g[None, :]) & kept[None, :]).to(tl.int32), 1) > 0


@triton.jit
def _choose(
    logits,  # [E], of one row
    bias,  # [E] float32, of the choice
    weights,  # [TOP_K + SHARED]
    experts,  # [TOP_K + SHARED]
    places,  # [TOP_K + SHARED]: its index among its expert's pairs
    counts,  # [E + SHARED]: pairs of each expert so far
    E,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    SCORES: tl.constexpr,
    BY_LOGITS: tl.constexpr,
    OF_CHOSEN: tl.constexpr,
    EPSILON: tl.constexpr,
    SCALE: tl.constexpr,
    GROUPS: tl.constexpr,  # 1: experts are chosen from all
    TOP_GROUPS: tl.constexpr,
    GROUP_SCORE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    COUNT: tl.constexpr,
):
    e = tl.arange(0, BLOCK_E)
    read = _read(logits + e, e < E)
    most = 0.0
    all_shares = 1.0
    if SCORES < SIGMOID:
        logit = _as_inf(read)
        most = tl.max(logit, 0)
        share = tl.where(e < E, tl.exp(logit - most), 0.0)
        if not BY_LOGITS or not OF_CHOSEN or EPSILON > 0:
            all_shares = tl.sum(share, 0)
    else:
        share = tl.where(e < E, _score(read, SCORES), 0.0)
    mine = _choice(logits, bias, e, E, most, all_shares, SCORES, BY_LOGITS, HAS_BIAS)
    eligible = e < E
    if GROUPS > 1:
        kept, size = _top_groups(
            logits, bias, E, most, all_shares,
            GROUPS, TOP_GROUPS, GROUP_SCORE, BLOCK_S, SCORES, BY_LOGITS, HAS_BIAS,
        )  # fmt: skip
        BLOCK_G: tl.constexpr = triton.next_power_of_2(GROUPS)
        eligible = eligible & _in_groups(e, kept, size, BLOCK_G)
    rank = tl.zeros([BLOCK_E], tl.int32)
    for start in tl.range(0, E, CHUNK):
        o = start + tl.arange(0, CHUNK)
        other = _choice(logits, bias, o, E, most, all_shares, SCORES, BY_LOGITS, HAS_BIAS)
        before = (other[None, :] > mine[:, None]) | ((other[None, :] == mine[:, None]) & (o[None, :] < e[:, None]))
        rival = o < E
        if GROUPS > 1:
            rival = rival & _in_groups(o, kept, size, BLOCK_G)
        rank += tl.sum((before & rival[None, :]).to(tl.int32), 1)
    chosen = (rank < TOP_K) & eligible
    if OF_CHOSEN:
        # The softmax over the chosen experts is the softmax over all, divided by their sum.
        total = tl.sum(tl.where(chosen, share, 0.0), 0)
        if EPSILON > 0:
            total += EPSILON * all_shares
    else:
        total = all_shares
    weight = share / total
    if SCALE != 1.0:
        weight *= SCALE
    tl.store(weights + rank, weight, mask=chosen)
    tl.store(experts + rank, e, mask=chosen)
    if COUNT:
        # In any order: it decides the row in an expert's matrix, but not one bit of the result.
        place = tl.atomic_add(counts + e, tl.full([BLOCK_E], 1, tl.int32), mask=chosen, sem="relaxed")
        tl.store(places + rank, place, mask=chosen)
    if SHARED > 0:
        s = tl.arange(0, triton.next_power_of_2(SHARED))
        tl.store(weights + TOP_K + s, tl.full(s.shape, 1.0, tl.float32), mask=s < SHARED)
        tl.store(experts + TOP_K + s, E + s, mask=s < SHARED)
        if COUNT:
            # Every row has these: its own number is its place.
            tl.store(places + TOP_K + s, tl.zeros(s.shape, tl.int32) + tl.program_id(0), mask=s < SHARED)
            rows = tl.zeros(s.shape, tl.int32) + tl.num_programs(0)
            tl.store(counts + E + s, rows, mask=(s < SHARED) & (tl.program_id(0) == 0))


@triton.jit
def _route_kernel(
    logits,  # [N, E]
    correction,  # [E] float32: bias of the choice
    weights,  # [N, TOP_K + SHARED] float32
    experts,  # [N, TOP_K + SHARED] int32
    places,  # [N, TOP_K + SHARED] int32
    counts,  # [MAX_EXPERTS] int32: zero before
    E,
    stride,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    SCORES: tl.constexpr,
    BY_LOGITS: tl.constexpr,
    OF_CHOSEN: tl.constexpr,
    EPSILON: tl.constexpr,
    SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_SCORE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
    COUNT: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    to = row * (TOP_K + SHARED)
    _choose(
        logits + row * stride, correction, weights + to, experts + to, places + to, counts, E,
        TOP_K, BLOCK_E, CHUNK, SCORES, BY_LOGITS, OF_CHOSEN, EPSILON, SCALE, GROUPS, TOP_GROUPS, GROUP_SCORE, BLOCK_S,
        SHARED, HAS_CORRECTION, COUNT,
    )  # fmt: skip


@triton.jit
def _router_kernel(
    x,  # [N, H]
    norm_weight,  # [H] of an RMSNorm of x
    router,  # [E, H]
    bias,  # [E]
    correction,  # [E] float32: bias of the choice
    logits,  # [N, E] float32
    arrived,  # [MAX_FUSED_ROWS] int32: zero before and after
    weights,  # [N, TOP_K + SHARED] float32
    experts,  # [N, TOP_K + SHARED] int32
    normed,  # [N, H]
    E,
    H,
    x_stride,
    eps,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    SCORES: tl.constexpr,
    BY_LOGITS: tl.constexpr,
    OF_CHOSEN: tl.constexpr,
    EPSILON: tl.constexpr,
    SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_SCORE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
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
    to = row * (TOP_K + SHARED)
    _choose(
        logits + row * E, correction, weights + to, experts + to, experts, experts, E,
        TOP_K, BLOCK_E, CHUNK, SCORES, BY_LOGITS, OF_CHOSEN, EPSILON, SCALE, GROUPS, TOP_GROUPS, GROUP_SCORE, BLOCK_S,
        SHARED, HAS_CORRECTION, False,
    )  # fmt: skip


class RouteWorkspace(SharedWorkspace):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.counts = self.new_counters(MAX_EXPERTS)
        self.arrived = self.new_counters(MAX_FUSED_ROWS)


def route(
    logits: torch.Tensor, routing: Routing, correction_bias: torch.Tensor | None = None, count: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Weights, experts and, if they are counted in the workspace, places: all [N, slots]."""
    rows, num_experts = logits.shape
    weights, experts = _new(rows, routing.slots, logits.device)
    places = torch.empty_like(experts) if count else None
    if rows:
        counts = RouteWorkspace.of(logits.device).counts
        _route_kernel[(rows,)](
            logits, correction_bias, weights, experts, places if places is not None else experts, counts, num_experts,
            logits.stride(0), COUNT=count, num_warps=4 if num_experts > 32 else 1,
            **_flags(routing, num_experts, correction_bias), **early_launch(logits),
        )  # fmt: skip
    return weights, experts, places


def router(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: RMSNormParams | None,
    routing: Routing,
    correction_bias: torch.Tensor | None = None,
    normed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """route() of x's product with the router's weight, in one kernel, which keeps the normed x if asked."""
    rows, hidden = x.shape
    assert rows <= MAX_FUSED_ROWS
    num_experts = weight.shape[0]
    weights, experts = _new(rows, routing.slots, x.device)
    logits = torch.empty(rows, num_experts, dtype=torch.float32, device=x.device)
    block_h = triton.next_power_of_2(hidden)
    block_n = max(1, TILE // block_h)
    gain, eps = norm if norm is not None else (None, 0.0)
    _router_kernel[(rows, triton.cdiv(num_experts, block_n))](
        x, gain, weight, bias, correction_bias, logits, RouteWorkspace.of(x.device).arrived, weights, experts, normed,
        num_experts, hidden, x.stride(0), eps, BLOCK_N=block_n, BLOCK_H=block_h, HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None, KEEPS_NORMED=normed is not None, num_warps=4,
        **_flags(routing, num_experts, correction_bias), **early_launch(x),
    )  # fmt: skip
    return weights, experts


def _flags(routing: Routing, num_experts: int, correction_bias: torch.Tensor | None) -> dict[str, Any]:
    routing.check(num_experts)
    block = triton.next_power_of_2(num_experts)
    groups = routing.groups if routing.has_groups else 1
    return {
        "TOP_K": routing.top_k,
        "BLOCK_E": block,
        "CHUNK": min(block, max(8, COMPARED // block)),
        "SCORES": SCORES.index(routing.scores),
        "BY_LOGITS": routing.by_logits(correction_bias is not None),
        "OF_CHOSEN": routing.of_chosen,
        "EPSILON": routing.epsilon,
        "SCALE": routing.scale,
        "GROUPS": groups,
        "TOP_GROUPS": routing.top_groups if groups > 1 else 1,
        "GROUP_SCORE": GROUP_SCORES.index(routing.group_score),
        "BLOCK_S": triton.next_power_of_2(num_experts // groups),
        "SHARED": routing.shared,
        "HAS_CORRECTION": correction_bias is not None,
    }


def _new(rows: int, slots: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.empty(rows, slots, dtype=torch.float32, device=device)
    return weights, torch.empty(rows, slots, dtype=torch.int32, device=device)
