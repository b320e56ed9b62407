"""Latent attention of rows of several queries: over expanded keys and values, or over latents as they lie."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.dispatch import early_launch
from quire.kernels.kv_scales import KVScales
from quire.kernels.triton.latent_attend import LOG2E, latent_attend, load_queries, padded, page_arguments
from quire.kernels.triton.latent_decode import tile_of_heads, tuning_for
from quire.kernels.triton.latent_expand import Expanded, ExpansionPlan


def queries_per_block(dtype: torch.dtype) -> int:
    return 32 if dtype is torch.float32 else 128


@triton.jit
def _expanded_kernel(
    q,  # [N, H, NOPE + ROPE], with strides of its own
    out,  # [N, H, V]
    keys,  # of Expanded
    values,
    ropes,
    starts,
    query_blocks,  # [blocks of queries, 2]: row of the batch (-1: nothing to do), first query in it
    query_start,
    seq_lens,
    factor,  # from scores to powers of two
    q_token,
    q_head,
    H: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    V: tl.constexpr,
    NP: tl.constexpr,
    PP: tl.constexpr,
    VP: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    # Blocks of the longest rows come first, for all heads.
    head, entry = tl.program_id(0) % H, query_blocks + 2 * (tl.program_id(0) // H)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    i = tl.load(entry)
    if i < 0:
        return
    start = tl.load(starts + i)
    if start < 0:
        return
    first = tl.load(entry + 1)
    first_token = tl.load(query_start + i)
    num_queries = tl.load(query_start + i + 1) - first_token
    context = tl.load(seq_lens + i) - num_queries
    query = first + tl.arange(0, QUERIES)
    real = query < num_queries
    n, p, v = tl.arange(0, NP), tl.arange(0, PP), tl.arange(0, VP)
    at = q + ((first_token + query).to(tl.int64) * q_token + head * q_head)[:, None]
    nope = tl.load(at + n[None, :], mask=real[:, None] & (n < NOPE)[None, :], other=0.0)
    rope = tl.load(at + NOPE + p[None, :], mask=real[:, None] & (p < ROPE)[None, :], other=0.0)
    q_pos = context + query
    end = context + tl.minimum(first + QUERIES, num_queries)
    # Whole tiles that even the first query sees need no mask.
    masked_from = (context + first + 1) // TILE * TILE
    acc = tl.zeros([QUERIES, VP], tl.float32)
    max_score = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    line = start.to(tl.int64) * H + head
    keys += line * NOPE
    values += line * V
    ropes += start.to(tl.int64) * ROPE
    acc, max_score, total = _attend_expanded(
        nope, rope, acc, max_score, total, keys, values, ropes, 0, masked_from, q_pos, factor,
        H, NOPE, ROPE, V, NP, PP, VP, TILE, False,
    )  # fmt: skip
    acc, max_score, total = _attend_expanded(
        nope, rope, acc, max_score, total, keys, values, ropes, masked_from, end, q_pos, factor,
        H, NOPE, ROPE, V, NP, PP, VP, TILE, True,
    )  # fmt: skip
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    to = out + ((first_token + query).to(tl.int64) * H + head)[:, None] * V + v[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=real[:, None] & (v < V)[None, :])


@triton.jit
def _attend_expanded(
    q_nope, q_rope, acc, max_score, total, keys, values, ropes, begin, end, q_pos, factor,
    H: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, V: tl.constexpr,
    NP: tl.constexpr, PP: tl.constexpr, VP: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax over tiles of keys of one row and head."""
    n, p, v = tl.arange(0, NP), tl.arange(0, PP), tl.arange(0, VP)
    for tile in range(begin, end, TILE):
        key = tile + tl.arange(0, TILE)
        inside = key < end
        place = key.to(tl.int64)
        k_at = keys + (place * (H * NOPE))[None, :] + n[:, None]
        r_at = ropes + (place * ROPE)[None, :] + p[:, None]
        v_at = values + (place * (H * V))[:, None] + v[None, :]
        if MASKED or NOPE != NP or ROPE != PP or V != VP:
            k = tl.load(k_at, mask=inside[None, :] & (n < NOPE)[:, None], other=0.0)
            r = tl.load(r_at, mask=inside[None, :] & (p < ROPE)[:, None], other=0.0)
        else:
            k, r = tl.load(k_at), tl.load(r_at)
        scores = tl.dot(q_nope, k, input_precision="ieee")
        scores = tl.dot(q_rope, r, scores, input_precision="ieee")
        if MASKED:
            scores = tl.where(inside[None, :] & (key[None, :] <= q_pos[:, None]), scores, float("-inf"))
        new_max = tl.maximum(max_score, tl.max(scores, 1) * factor)
        base = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        weights = tl.math.exp2(scores * factor - base[:, None])
        shrink = tl.math.exp2(max_score - base)
        total = total * shrink + tl.sum(weights, 1)
        if MASKED or NOPE != NP or ROPE != PP or V != VP:
            x = tl.load(v_at, mask=inside[:, None] & (v < V)[None, :], other=0.0)
        else:
            x = tl.load(v_at)
        acc = tl.dot(weights.to(x.dtype), x, acc * shrink[:, None], input_precision="ieee")
        max_score = new_max
    return acc, max_score, total


@triton.jit(do_not_specialize=["table_stride", "first_unit", "units"])
def _absorbed_kernel(
    q,  # [units, H, RANK]: queries in the latent space, of tokens from first_unit on
    q_rope,  # [N, H, ROPE], with strides of its own
    out,  # [units, H, RANK]
    kv_cache,
    starts,
    query_blocks,
    rows,
    query_start,
    seq_lens,
    block_table,
    table_stride,
    first_unit,
    units,
    factor,
    token_scales,
    cache_scale,
    rope_token,
    rope_head,
    H: tl.constexpr,
    HB: tl.constexpr,  # heads of a program
    Q: tl.constexpr,  # queries of a program
    M: tl.constexpr,  # HB * Q, padded
    QUERIES: tl.constexpr,  # of a block
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RP: tl.constexpr,
    PP: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    SCALE_PAGE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    PER_BLOCK: tl.constexpr = (QUERIES + Q - 1) // Q
    entry = query_blocks + 2 * (tl.program_id(0) // PER_BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    i = tl.load(entry)
    if i < 0:
        return
    first_token = tl.load(query_start + i)
    num_queries = tl.load(query_start + i + 1) - first_token
    block = tl.load(entry + 1)
    first = block + tl.program_id(0) % PER_BLOCK * Q
    past = tl.minimum(tl.minimum(first + Q, block + QUERIES), num_queries)
    in_slice = (first_token + past > first_unit) & (first_token + first < first_unit + units)
    if (tl.load(starts + i) >= 0) | (first >= past) | (not in_slice):
        return
    context = tl.load(seq_lens + i) - num_queries
    m = tl.arange(0, M)
    query, head = first + m // HB, tl.program_id(1) * HB + m % HB
    token = first_token + query
    unit = token - first_unit
    real = (m < HB * Q) & (query < past) & (head < H) & (unit >= 0) & (unit < units)
    vectors, turned, q_at = load_queries(
        q, unit, q_rope, token, rope_token, rope_head, head, real, H, RANK, ROPE, RP, PP, CHUNK
    )  # fmt: skip
    pages = block_table + tl.load(rows + i).to(tl.int64) * table_stride
    lengths = context + query + 1
    masked_from = (context + first + 1) // TILE * TILE
    acc = tl.zeros([RP, M], tl.float32)
    max_score = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([TILE, M], tl.float32)
    acc, max_score, total = latent_attend(
        vectors, turned, q_at, acc, max_score, total, kv_cache, pages, 0, masked_from, lengths, factor,
        token_scales, cache_scale, RANK, ROPE, RP, PP, CHUNK, BLOCK_SIZE, PAGE, SCALE_PAGE, QUANTIZED, TILE, False,
    )  # fmt: skip
    acc, max_score, total = latent_attend(
        vectors, turned, q_at, acc, max_score, total, kv_cache, pages, masked_from, context + past, lengths, factor,
        token_scales, cache_scale, RANK, ROPE, RP, PP, CHUNK, BLOCK_SIZE, PAGE, SCALE_PAGE, QUANTIZED, TILE, True,
    )  # fmt: skip
    sums = tl.sum(total, 0)
    acc *= (1.0 / tl.where(sums > 0, sums, 1.0))[None, :]
    column = tl.arange(0, RP)
    to = out + ((unit.to(tl.int64) * H + head) * RANK)[None, :] + column[:, None]
    tl.store(to, acc.to(out.dtype.element_ty), mask=real[None, :] & (column < RANK)[:, None])


def expanded_prefill(
    q: torch.Tensor,  # [N, H, nope + rope]
    out: torch.Tensor,  # [N, H, v]
    expanded: Expanded,
    plan: ExpansionPlan,
    query_blocks: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    tile: int | None = None,
    warps: int | None = None,
    stages: int | None = None,
) -> None:
    """Fills `out` for the rows that the plan expands."""
    (_, heads, nope), v, rope = expanded.keys.shape, expanded.values.shape[2], expanded.ropes.shape[1]
    full = q.dtype is torch.float32
    sizes = {name: max(16, triton.next_power_of_2(size)) for name, size in (("NP", nope), ("PP", rope), ("VP", v))}
    # Of keys and values, as many tiles at once as shared memory holds beside the queries.
    stages = stages or (1 if full else 3 if sizes["NP"] + sizes["VP"] <= 256 else 2)
    _expanded_kernel[(heads * len(query_blocks),)](
        q, out, expanded.keys, expanded.values, expanded.ropes, plan.starts, query_blocks, query_start, seq_lens,
        scale * LOG2E, q.stride(0), q.stride(1), H=heads, NOPE=nope, ROPE=rope, V=v,
        QUERIES=queries_per_block(q.dtype), TILE=tile or (16 if full else 64),
        num_warps=warps or (4 if full else 8), num_stages=stages, **sizes, **early_launch(q),
    )  # fmt: skip


def absorbed_prefill(
    q: torch.Tensor,  # [units, H, rank]: of tokens from first_unit on
    q_rope: torch.Tensor,  # [N, H, rope]
    kv_cache: torch.Tensor,
    plan: ExpansionPlan,
    query_blocks: torch.Tensor,
    rows: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    first_unit: int,
    scale: float,
    scales: KVScales | None = None,
) -> torch.Tensor:  # [units, H, rank], for the rows that the plan does not expand
    units, num_heads, rank = q.shape
    heads, _ = tile_of_heads(num_heads, 1, q.dtype)
    queries = max(1, (16 if q.dtype is torch.float32 else 64) // heads)
    columns = max(16, triton.next_power_of_2(heads * queries))
    tuning, block = tuning_for(columns, q.dtype, scales is not None), queries_per_block(q.dtype)
    out = torch.empty_like(q)
    _absorbed_kernel[(len(query_blocks) * triton.cdiv(block, queries), triton.cdiv(num_heads, heads))](
        q, q_rope, out, kv_cache, plan.starts, query_blocks, rows, query_start, seq_lens,
        block_table, block_table.stride(0), first_unit, units, scale * LOG2E,
        rope_token=q_rope.stride(0), rope_head=q_rope.stride(1),
        H=num_heads, HB=heads, Q=queries, M=columns, QUERIES=block, TILE=tuning.tile,
        num_warps=tuning.warps, num_stages=tuning.stages,
        **padded(rank, q_rope.shape[2], q.dtype), **page_arguments(kv_cache, scales), **early_launch(q),
    )  # fmt: skip
    return out
