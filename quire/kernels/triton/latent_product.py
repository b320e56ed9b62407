"""Products of each head's vectors with its own weight: queries into the latent space, and results out of it.

`gemv` has a token and head in each program and multiplies on the CUDA cores, for a few tokens. `dot` has 16 tokens of a
head, `many` larger tiles, of which the next is loaded while one is multiplied; the weight is the left operand in both
(see skinny_linear.py). Vectors that come out of attention are parts,
one for each split of the keys, combined here in their order whichever program wrote them last.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.dispatch import early_launch

MAX_GEMV_UNITS, MANY_UNITS = 8, 48
PARTS_AT_ONCE = 16
MAX_STATIC_PARTS = 8


@dataclass(frozen=True)
class ManyTuning:
    """A program of many units: a tile of these by a tile of outputs."""

    block_u: int
    block_j: int
    block_k: int = 64
    warps: int = 4
    stages: int = 3


def many_tuning(outputs: int, inputs: int, most: int) -> ManyTuning:
    """Of `most` parts. Into the latent space, inputs are few and read in one step; out of it, a program has all
    outputs, so that parts are read once."""
    size = max(16, triton.next_power_of_2(inputs))
    if most == 1 and size <= 128:
        return ManyTuning(64, min(128, max(64, triton.next_power_of_2(outputs))), size)
    return ManyTuning(16, min(128, max(64, triton.next_power_of_2(outputs))), min(64, size))


@dataclass(frozen=True, eq=False)
class Parts:
    """What splits of keys left behind. A unit's parts are those of the shared prefix, then those of its own keys."""

    out: torch.Tensor  # [units, H, most parts, rank] float32, as far as it is used
    sums: torch.Tensor  # [units, H, most parts, 2] float32: maximum score as a power of two, sum of weights
    counts: torch.Tensor  # [units] int32: parts of a unit

    @classmethod
    def empty(cls, units: int, num_heads: int, most: int, rank: int, device: torch.device) -> "Parts":
        by_head = torch.empty(units, num_heads, most, rank, dtype=torch.float32, device=device)
        sums = torch.empty(units, num_heads, most, 2, dtype=torch.float32, device=device)
        return cls(by_head, sums, torch.empty(units, dtype=torch.int32, device=device))


@triton.jit(do_not_specialize=["most"])
def _gemv_kernel(
    x,  # [units or N, H, K], with strides of its own; with PARTS those of Parts.out
    sums,
    counts,
    most,  # parts
    w,  # [H, ...]: element (j, k) of a head is at j * W_J + k * W_K
    y,  # [units or N, H, J]
    tokens,  # [units]: -1: nothing to do; unused without MAPPED
    x_token,
    x_head,
    H: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    W_J: tl.constexpr,
    W_K: tl.constexpr,
    BLOCK_J: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PARTS: tl.constexpr,
    FROM_UNITS: tl.constexpr,  # x is by unit and y by token; otherwise the other way round
    MAPPED: tl.constexpr,
    PDL: tl.constexpr,
):
    unit, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    j = tl.program_id(0) * BLOCK_J + tl.arange(0, BLOCK_J)
    k = tl.arange(0, KP)
    if PDL:
        gdc_launch_dependents()
    # The weights are being loaded before the kernel that writes x has ended.
    at = w + head.to(tl.int64) * (J * K) + j[:, None] * W_J + k[None, :] * W_K
    weight = tl.load(at, mask=(j < J)[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    token = unit
    if MAPPED:
        token = tl.load(tokens + unit).to(tl.int64)
        if token < 0:
            return
    if PARTS:
        count = tl.load(counts + unit)
        first_part = (unit * H + head) * most
        vector = tl.zeros([KP], tl.float32)
        max_score, total = float("-inf"), 0.0
        for first in range(0, count, AT_ONCE):
            part = first + tl.arange(0, AT_ONCE)
            place = first_part + part
            part_max = tl.load(sums + place * 2, mask=part < count, other=float("-inf"), cache_modifier=".cg")
            part_total = tl.load(sums + place * 2 + 1, mask=part < count, other=0.0, cache_modifier=".cg")
            mask = (part < count)[:, None] & (k < K)[None, :]
            values = tl.load(x + place[:, None] * K + k[None, :], mask=mask, other=0.0, cache_modifier=".cg")
            new_max = tl.maximum(max_score, tl.max(part_max, 0))
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
            old, new = tl.math.exp2(max_score - base), tl.math.exp2(part_max - base)
            vector = vector * old + tl.sum(values * new[:, None], 0)
            total = total * old + tl.sum(part_total * new, 0)
            max_score = new_max
        vector *= 1.0 / tl.where(total > 0, total, 1.0)
    else:
        source = unit if FROM_UNITS else token
        vector = tl.load(x + source * x_token + head * x_head + k, mask=k < K, other=0.0).to(tl.float32)
    target = token if FROM_UNITS else unit
    result = tl.sum(weight * vector[None, :], 1)
    tl.store(y + (target * H + head) * J + j, result.to(y.dtype.element_ty), mask=j < J)


@triton.jit(do_not_specialize=["most", "units"])
def _dot_kernel(
    x,
    sums,
    counts,
    most,
    w,
    y,
    tokens,
    x_token,
    x_head,
    units,
    H: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    W_J: tl.constexpr,
    W_K: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    FROM_UNITS: tl.constexpr,
    MAPPED: tl.constexpr,
    PDL: tl.constexpr,
):
    u = tl.program_id(2) * BLOCK_U + tl.arange(0, BLOCK_U)
    head = tl.program_id(1)
    j = tl.program_id(0) * BLOCK_J + tl.arange(0, BLOCK_J)
    real = u < units
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = u.to(tl.int64)
    if MAPPED:
        token = tl.load(tokens + u, mask=real, other=-1).to(tl.int64)
        real = real & (token >= 0)
        if tl.max(token, 0) < 0:
            return
    unit = u.to(tl.int64)
    source = unit if FROM_UNITS else token
    target = token if FROM_UNITS else unit
    count = tl.zeros([BLOCK_U], tl.int32)
    max_score = tl.full([BLOCK_U], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_U], tl.float32)
    first_part = (unit * H + head) * most
    if PARTS:
        count = tl.load(counts + u, mask=real, other=0)
        for part in range(0, tl.max(count, 0)):
            place = (first_part + part) * 2
            part_max = tl.load(sums + place, mask=part < count, other=float("-inf"), cache_modifier=".cg")
            part_total = tl.load(sums + place + 1, mask=part < count, other=0.0, cache_modifier=".cg")
            new_max = tl.maximum(max_score, part_max)
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
            total = total * tl.math.exp2(max_score - base) + part_total * tl.math.exp2(part_max - base)
            max_score = new_max
        max_score = tl.where(max_score == float("-inf"), 0.0, max_score)
        total = tl.where(total > 0, total, 1.0)
    acc = tl.zeros([BLOCK_J, BLOCK_U], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        at = w + head.to(tl.int64) * (J * K) + j[:, None] * W_J + k[None, :] * W_K
        weight = tl.load(at, mask=(j < J)[:, None] & (k < K)[None, :], other=0.0)
        if PARTS:
            sum_of_parts = tl.zeros([BLOCK_K, BLOCK_U], tl.float32)
            for part in range(0, tl.max(count, 0)):
                place = first_part + part
                here = part < count
                part_max = tl.load(sums + place * 2, mask=here, other=float("-inf"), cache_modifier=".cg")
                share = tl.math.exp2(part_max - max_score) / total
                mask = here[None, :] & (k < K)[:, None]
                values = tl.load(x + place[None, :] * K + k[:, None], mask=mask, other=0.0, cache_modifier=".cg")
                sum_of_parts += values * share[None, :]
            vectors = sum_of_parts.to(w.dtype.element_ty)
        else:
            from_x = x + (source * x_token + head * x_head)[None, :] + k[:, None]
            vectors = tl.load(from_x, mask=real[None, :] & (k < K)[:, None], other=0.0)
        acc = tl.dot(weight, vectors, acc, input_precision="ieee")
    place_y = (target * H + head)[None, :] * J + j[:, None]
    tl.store(y + place_y, acc.to(y.dtype.element_ty), mask=(j < J)[:, None] & real[None, :])


@triton.jit(do_not_specialize=["most", "units"])
def _many_kernel(
    x,
    sums,
    counts,
    most,
    w,
    y,
    tokens,
    x_token,
    x_head,
    units,
    H: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    W_J: tl.constexpr,
    W_K: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    MOST: tl.constexpr,  # power of two, at least `most`: all parts are asked for at once, ahead of their product
    PARTS: tl.constexpr,
    FROM_UNITS: tl.constexpr,
    MAPPED: tl.constexpr,
    PDL: tl.constexpr,
):
    u = tl.program_id(2) * BLOCK_U + tl.arange(0, BLOCK_U)
    head = tl.program_id(1)
    j = tl.program_id(0) * BLOCK_J + tl.arange(0, BLOCK_J)
    real = u < units
    ONE_STEP: tl.constexpr = K <= BLOCK_K
    w_rows = w + head.to(tl.int64) * (J * K) + j[:, None] * W_J
    k = tl.arange(0, BLOCK_K)
    if ONE_STEP:
        # The weights are being loaded before the kernel that writes x has ended.
        weight = tl.load(w_rows + k[None, :] * W_K, mask=(j < J)[:, None] & (k < K)[None, :], other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = u.to(tl.int64)
    if MAPPED:
        token = tl.load(tokens + u, mask=real, other=-1).to(tl.int64)
        real = real & (token >= 0)
        if tl.max(token, 0) < 0:
            return
    unit = u.to(tl.int64)
    source = unit if FROM_UNITS else token
    target = token if FROM_UNITS else unit
    from_x = x + source * x_token + head * x_head
    count = tl.zeros([BLOCK_U], tl.int32)
    parts = tl.arange(0, MOST)
    shares = tl.zeros([MOST, BLOCK_U], tl.float32)
    if PARTS:
        count = tl.load(counts + u, mask=real, other=0)
        here = parts[:, None] < count[None, :]
        place = ((unit * H + head) * most)[None, :] + parts[:, None]
        part_max = tl.load(sums + place * 2, mask=here, other=float("-inf"), cache_modifier=".cg")
        part_total = tl.load(sums + place * 2 + 1, mask=here, other=0.0, cache_modifier=".cg")
        max_score = tl.max(part_max, 0)
        shares = tl.math.exp2(part_max - tl.where(max_score == float("-inf"), 0.0, max_score)[None, :])
        total = tl.sum(part_total * shares, 0)
        shares /= tl.where(total > 0, total, 1.0)[None, :]
        from_x = x + (unit * H + head) * most * K
    acc = tl.zeros([BLOCK_J, BLOCK_U], tl.float32)
    if ONE_STEP:
        vectors = _vectors(from_x, k, count, parts, shares, real, K, BLOCK_U, MOST, PARTS, w.dtype.element_ty)
        acc = tl.dot(weight, vectors, acc)
    else:
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            k = start + tl.arange(0, BLOCK_K)
            weight = tl.load(w_rows + k[None, :] * W_K, mask=(j < J)[:, None] & (k < K)[None, :], other=0.0)
            vectors = _vectors(from_x, k, count, parts, shares, real, K, BLOCK_U, MOST, PARTS, w.dtype.element_ty)
            acc = tl.dot(weight, vectors, acc)
    place_y = (target * H + head)[None, :] * J + j[:, None]
    tl.store(y + place_y, acc.to(y.dtype.element_ty), mask=(j < J)[:, None] & real[None, :])


@triton.jit
def _vectors(
    from_x, k, count, parts, shares, real,
    K: tl.constexpr, BLOCK_U: tl.constexpr, MOST: tl.constexpr, PARTS: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """[BLOCK_K, BLOCK_U]: columns `k` of the units' vectors, parts combined."""
    inside = (k < K)[:, None]
    if not PARTS:
        return tl.load(from_x[None, :] + k[:, None], mask=inside & real[None, :], other=0.0)
    total = tl.zeros([k.shape[0], BLOCK_U], tl.float32)
    for part in tl.static_range(MOST):
        share = tl.sum(tl.where(parts[:, None] == part, shares, 0.0), 0)
        here = inside & (part < count)[None, :]
        total += tl.load(from_x[None, :] + (part * K + k[:, None]), mask=here, other=0.0) * share[None, :]
    return total.to(TYPE)


def into_latent(
    q: torch.Tensor,  # [N, H, nope], with strides of its own
    w_uk: torch.Tensor,  # [H, nope, rank]
    tokens: torch.Tensor | None = None,  # [units]; None: unit i is token i
    many: bool = False,  # of the units are likely to have a token
    tuning: ManyTuning | None = None,
) -> torch.Tensor:  # [units, H, rank]
    heads, nope, rank = w_uk.shape
    units = len(tokens) if tokens is not None else len(q)
    y = torch.empty(units, heads, rank, dtype=q.dtype, device=q.device)
    _launch(q, None, w_uk, y, tokens, units, (rank, nope), (1, rank), False, many, tuning)
    return y


def out_of_latent(
    x: torch.Tensor | Parts,  # [units, H, rank]
    w_uv: torch.Tensor,  # [H, v, rank]
    out: torch.Tensor,  # [N, H, v]
    tokens: torch.Tensor | None = None,  # [units]; None: unit i is token i
    many: bool = False,  # of the units are likely to have a token
    tuning: ManyTuning | None = None,
) -> None:
    _, v, rank = w_uv.shape
    parts = x if isinstance(x, Parts) else None
    vectors = x.out if isinstance(x, Parts) else x
    _launch(vectors, parts, w_uv, out, tokens, len(vectors), (v, rank), (rank, 1), True, many, tuning)


def _launch(
    x: torch.Tensor,
    parts: Parts | None,
    w: torch.Tensor,
    y: torch.Tensor,
    tokens: torch.Tensor | None,
    units: int,
    sizes: tuple[int, int],
    strides: tuple[int, int],
    from_units: bool,
    many: bool,
    tuning: ManyTuning | None,
) -> None:
    assert w.is_contiguous() and y.is_contiguous() and x.stride(-1) == 1
    outputs, inputs = sizes
    arguments = (
        x, parts.sums if parts is not None else x, parts.counts if parts is not None else x,
        parts.out.shape[2] if parts is not None else 1, w, y, tokens if tokens is not None else x,
        x.stride(0), x.stride(1),
    )  # fmt: skip
    shape = dict(
        H=w.shape[0], J=outputs, K=inputs, W_J=strides[0], W_K=strides[1], PARTS=parts is not None,
        FROM_UNITS=from_units, MAPPED=tokens is not None, **early_launch(x),
    )  # fmt: skip
    # With a map, units are as many as a step is padded to: the kernel is the same for any number.
    if units <= MAX_GEMV_UNITS and tokens is None:
        width = max(16, triton.next_power_of_2(inputs))
        block = min(max(8192 // width, 16), triton.next_power_of_2(outputs))
        _gemv_kernel[(triton.cdiv(outputs, block), w.shape[0], units)](
            *arguments, KP=width, BLOCK_J=block, AT_ONCE=PARTS_AT_ONCE, num_warps=4, **shape
        )
        return
    full = w.dtype is torch.float32
    most = parts.out.shape[2] if parts is not None else 1
    many = many or tuning is not None or (tokens is None and units > MANY_UNITS)
    if many and not full and most <= MAX_STATIC_PARTS:
        tuning = tuning or many_tuning(outputs, inputs, most)
        _many_kernel[(triton.cdiv(outputs, tuning.block_j), w.shape[0], triton.cdiv(units, tuning.block_u))](
            *arguments, units, BLOCK_U=tuning.block_u, BLOCK_J=tuning.block_j, BLOCK_K=tuning.block_k,
            STAGES=tuning.stages, MOST=triton.next_power_of_2(most), num_warps=tuning.warps,
            num_stages=tuning.stages, **shape,
        )  # fmt: skip
        return
    # Parts are combined for all columns at once: each step of a loop over them waits for memory.
    block_k = 32 if full else max(16, triton.next_power_of_2(inputs)) if parts is not None else 64
    _dot_kernel[(triton.cdiv(outputs, 64), w.shape[0], triton.cdiv(units, 16))](
        *arguments, units, BLOCK_U=16, BLOCK_J=64, BLOCK_K=block_k,
        num_warps=4, num_stages=1 if parts is not None else 3, **shape,
    )  # fmt: skip
