"""Which rows of a step have their latents expanded to keys and values, and expanding them.

Lengths are on the device alone, so that a step can be captured: there is memory for the keys of the step's own tokens
and of some context, the device decides which rows use it, and programs without work return. A row that does not fit, or
has too few queries for it to pay, is attended to in the latent space.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.dispatch import early_launch
from quire.kernels.kv_scales import KVScales
from quire.kernels.triton.latent_attend import page_arguments

CONTEXT_BYTES = 128 << 20  # for keys and values of cached context
BLOCK, WIDE_BLOCK = 128, 64  # keys; of heads of which registers hold no more


@dataclass(frozen=True, eq=False)
class ExpansionPlan:
    """The same for all layers of a step."""

    starts: torch.Tensor  # [n] int32: where a row's keys begin among those expanded; -1: it has none
    sources: torch.Tensor  # [capacity] int32: slots of the cache
    used: torch.Tensor  # [1] int32: of the capacity
    decode_tokens: torch.Tensor  # [n] int32: the token of a row that has one; -1
    prompt_tokens: torch.Tensor  # [N] int32: the token itself, if its row has several and is not expanded; -1


@dataclass(frozen=True, eq=False)
class Expanded:
    keys: torch.Tensor  # [capacity, H, nope]
    values: torch.Tensor  # [capacity, H, v]
    ropes: torch.Tensor  # [capacity, rope]


def min_queries(rank: int, nope: int, v: int) -> int:
    """From how many on expanding a key costs less than what each query saves by it: multiply-adds of a head."""
    return -(-rank * (nope + v) // max(1, 2 * rank - nope - v))


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "capacity", "min_queries", "table_stride"])
def _plan_kernel(
    rows,
    query_start,
    seq_lens,
    block_table,
    table_stride,
    starts,
    sources,
    used,
    decode_tokens,
    prompt_tokens,
    num_rows,
    num_tokens,
    capacity,
    min_queries,
    ROWS: tl.constexpr,  # the most, to the power of two
    BLOCK_SIZE: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program for each row; each finds the place of its keys among all rows' by itself."""
    i = tl.program_id(0)
    r = tl.arange(0, ROWS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    first_of = tl.load(query_start + r, mask=r < num_rows, other=0)
    queries = tl.load(query_start + r + 1, mask=r < num_rows, other=0) - first_of
    lengths = tl.load(seq_lens + r, mask=r < num_rows, other=0)
    prompt = (queries > 1) & (lengths > 0)
    fresh = prompt & (lengths == queries)
    later = prompt & (lengths > queries) & (queries >= min_queries)
    # Rows without context come first: there is always room for them.
    of_fresh = tl.where(fresh, lengths, 0)
    of_later = tl.where(later, lengths, 0)
    ends = tl.where(fresh, tl.cumsum(of_fresh, 0), tl.sum(of_fresh, 0) + tl.cumsum(of_later, 0))
    expanded = fresh | (later & (ends <= capacity))
    if i == 0:
        tl.store(used, tl.max(tl.where(expanded, ends, 0), 0))
    start = tl.sum(tl.where((r == i) & expanded, ends - lengths + 1, 0), 0) - 1
    tl.store(starts + i, start)
    first, end, length = tl.load(query_start + i), tl.load(query_start + i + 1), tl.load(seq_lens + i)
    tl.store(decode_tokens + i, tl.where((end - first == 1) & (length > 0), first, -1))
    absorbed = (start < 0) & (end - first > 1) & (length > 0)
    if i == num_rows - 1:  # tokens of no row are behind those of the last
        for step in range(end, num_tokens, STEP):
            token = step + tl.arange(0, STEP)
            tl.store(prompt_tokens + token, tl.full([STEP], -1, tl.int32), mask=token < num_tokens)
    for step in range(first, end, STEP):
        token = step + tl.arange(0, STEP)
        tl.store(prompt_tokens + token, tl.where(absorbed, token, -1), mask=token < end)
    if start >= 0:
        pages = block_table + tl.load(rows + i).to(tl.int64) * table_stride
        for step in range(0, length, STEP):
            key = step + tl.arange(0, STEP)
            page = tl.load(pages + key // BLOCK_SIZE, mask=key < length, other=0)
            tl.store(sources + start + key, page * BLOCK_SIZE + key % BLOCK_SIZE, mask=key < length)


@triton.jit
def _expand_kernel(
    kv_cache,
    sources,
    used,
    w_uk,  # [H, NOPE, RANK]
    w_uv,  # [H, V, RANK]
    keys,  # of Expanded
    values,
    ropes,
    token_scales,
    cache_scale,
    H: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    NOPE: tl.constexpr,
    V: tl.constexpr,
    PP: tl.constexpr,
    NP: tl.constexpr,
    VP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    SCALE_PAGE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    head, first = tl.program_id(0), tl.program_id(1) * BLOCK
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    count = tl.load(used)
    if first >= count:
        return
    kind: tl.constexpr = w_uk.dtype.element_ty
    place = first + tl.arange(0, BLOCK)
    inside = place < count
    slot = tl.load(sources + place, mask=inside, other=0).to(tl.int64)
    at = kv_cache + slot // BLOCK_SIZE * PAGE + slot % BLOCK_SIZE * (RANK + ROPE)
    by_token = tl.zeros([BLOCK], tl.float32) + cache_scale
    if SCALE_PAGE > 0:
        by_token = tl.load(token_scales + slot // BLOCK_SIZE * SCALE_PAGE + slot % BLOCK_SIZE, mask=inside, other=0.0)
    n, v = tl.arange(0, NP), tl.arange(0, VP)
    k_rows = w_uk + (head.to(tl.int64) * NOPE + tl.minimum(n, NOPE - 1))[None, :] * RANK
    v_rows = w_uv + (head.to(tl.int64) * V + tl.minimum(v, V - 1))[None, :] * RANK
    key = tl.zeros([BLOCK, NP], tl.float32)
    value = tl.zeros([BLOCK, VP], tl.float32)
    for start in range(0, RANK, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        latent = tl.load(at[:, None] + k[None, :], mask=inside[:, None] & (k < RANK)[None, :], other=0.0).to(kind)
        weight = tl.load(k_rows + k[:, None], mask=(k < RANK)[:, None], other=0.0)
        key = tl.dot(latent, weight, key, input_precision="ieee")
        weight = tl.load(v_rows + k[:, None], mask=(k < RANK)[:, None], other=0.0)
        value = tl.dot(latent, weight, value, input_precision="ieee")
    line = (place.to(tl.int64) * H + head)[:, None]
    factor = by_token[:, None]
    if QUANTIZED:
        key *= factor
        value *= factor
    tl.store(keys + line * NOPE + n[None, :], key.to(kind), mask=inside[:, None] & (n < NOPE)[None, :])
    tl.store(values + line * V + v[None, :], value.to(kind), mask=inside[:, None] & (v < V)[None, :])
    if head == 0:
        p = tl.arange(0, PP)
        here = inside[:, None] & (p < ROPE)[None, :]
        rope = tl.load(at[:, None] + RANK + p[None, :], mask=here, other=0.0).to(tl.float32)
        tl.store(ropes + place.to(tl.int64)[:, None] * ROPE + p[None, :], (rope * factor).to(kind), mask=here)


def plan_expansion(
    rows: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    page_tokens: int,
    num_tokens: int,
    context: int,  # tokens of it that there is room for
    min_queries: int,
    max_rows: int,
) -> ExpansionPlan:
    count, device = len(rows), rows.device

    def ints(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device=device)

    capacity = num_tokens + context
    plan = ExpansionPlan(ints(count), ints(capacity), ints(1), ints(count), ints(num_tokens))
    _plan_kernel[(count,)](
        rows, query_start, seq_lens, block_table, block_table.stride(0),
        plan.starts, plan.sources, plan.used, plan.decode_tokens, plan.prompt_tokens,
        count, num_tokens, capacity, min_queries, ROWS=triton.next_power_of_2(max(max_rows, count)),
        BLOCK_SIZE=page_tokens, STEP=1024, num_warps=4, **early_launch(rows),
    )  # fmt: skip
    return plan


def latent_expand(
    kv_cache: torch.Tensor,
    plan: ExpansionPlan,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    rope: int,
    scales: KVScales | None = None,
) -> Expanded:
    heads, nope, rank = w_uk.shape
    v, capacity = w_uv.shape[1], len(plan.sources)
    full = w_uk.dtype is torch.float32
    keys, values, ropes = (
        torch.empty(capacity, size, dtype=w_uk.dtype, device=w_uk.device) for size in (heads * nope, heads * v, rope)
    )
    padded_nope, padded_v = (max(16, triton.next_power_of_2(size)) for size in (nope, v))
    block = 32 if full else BLOCK if padded_nope + padded_v <= 256 else WIDE_BLOCK
    _expand_kernel[(heads, triton.cdiv(capacity, block))](
        kv_cache, plan.sources, plan.used, w_uk, w_uv, keys, values, ropes,
        H=heads, RANK=rank, ROPE=rope, NOPE=nope, V=v, PP=max(16, triton.next_power_of_2(rope)),
        NP=padded_nope, VP=padded_v, BLOCK=block, BLOCK_K=16 if full else 64, num_warps=8,
        num_stages=1 if full else 3 if block == BLOCK else 2,
        **page_arguments(kv_cache, scales), **early_launch(w_uk),
    )  # fmt: skip
    return Expanded(keys.view(-1, heads, nope), values.view(-1, heads, v), ropes)
