"""Prefill attention: rows of several query tokens, a whole prompt or a chunk, after any cached context."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.dispatch import early_launch
from quire.kernels.paged_attention import AttentionFeatures
from quire.kernels.triton.attend import attend, feature_flags, scale_arguments, score_scale, start


@triton.jit(do_not_specialize=["table_stride"])
def _prefill_kernel(
    q,  # [N, H, D]
    out,  # [N, H, D]
    kv_cache,
    query_blocks,  # [blocks of queries, 2]: row of the batch (-1: nothing to do), first query in it
    rows,
    query_start,
    seq_lens,
    block_table,
    table_stride,
    slopes,
    sinks,
    scale,
    softcap,
    token_scales,
    v_scale,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    QUERIES: tl.constexpr,  # of a block: as many as query_blocks was planned with
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    PAGE: tl.constexpr,
    SCALE_PAGE: tl.constexpr,
    V_SCALED: tl.constexpr,  # values are those in the cache times v_scale
    PDL: tl.constexpr,
):
    G: tl.constexpr = H // KV
    # One grid dimension: the others are limited to 65,535.
    entry = query_blocks + 2 * (tl.program_id(0) // KV)
    kv_head = tl.program_id(0) % KV
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    i = tl.load(entry)
    if i < 0:
        return
    first = tl.load(entry + 1)
    first_token = tl.load(query_start + i)
    num_queries = tl.load(query_start + i + 1) - first_token
    context = tl.load(seq_lens + i) - num_queries
    pages = block_table + tl.load(rows + i).to(tl.int64) * table_stride

    # The queries of a KV head's group are adjacent, so that a tile of keys serves them all.
    m = tl.arange(0, BLOCK_M)
    query = first + m // G
    head = kv_head * G + m % G
    real = (m < QUERIES * G) & (query < num_queries)
    columns = tl.arange(0, DP)
    at = ((first_token + query).to(tl.int64) * H + head)[:, None] * D + columns[None, :]
    here = real[:, None] & (columns < D)[None, :]
    vectors = tl.load(q + at, mask=here, other=0.0)
    q_pos = context + query
    slope = tl.load(slopes + head, mask=real, other=0.0) if ALIBI else tl.zeros([BLOCK_M], tl.float32)

    end = context + tl.minimum(first + QUERIES, num_queries)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(0, context + first - WINDOW + 1)
    acc, max_score, total = start(sinks, head, real, BLOCK_M, DP, SINKS)
    masked_from = begin
    if WINDOW == 0:
        # Whole tiles that even the first query sees need no mask.
        masked_from = (context + first + 1) // TILE * TILE
        acc, max_score, total = attend(
            vectors, acc, max_score, total, kv_cache, pages, kv_head, 0, masked_from, q_pos, slope, scale, softcap,
            token_scales, KV, D, DP, BLOCK_SIZE, TILE, False, 0, SOFTCAP, ALIBI, PAGE, SCALE_PAGE,
        )  # fmt: skip
    acc, max_score, total = attend(
        vectors, acc, max_score, total, kv_cache, pages, kv_head, masked_from, end, q_pos, slope, scale, softcap,
        token_scales, KV, D, DP, BLOCK_SIZE, TILE, True, WINDOW, SOFTCAP, ALIBI, PAGE, SCALE_PAGE,
    )  # fmt: skip
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if V_SCALED:
        acc *= v_scale
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=here)


def queries_per_block(group: int, dtype: torch.dtype) -> int:
    return block_m(group, dtype) // group


def block_m(group: int, dtype: torch.dtype) -> int:
    return max(32 if dtype is torch.float32 else 128, triton.next_power_of_2(group))


def paged_prefill(
    q: torch.Tensor,
    out: torch.Tensor,
    kv_cache: torch.Tensor,
    query_blocks: torch.Tensor,
    rows: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    features: AttentionFeatures,
    queries: int | None = None,
    tile: int | None = None,
    warps: int | None = None,
    stages: int | None = None,
) -> None:
    """Fills `out` for the queries in `query_blocks`, in blocks of `queries`: by default, and at most, this layer's
    `queries_per_block`."""
    _, num_heads, head_size = q.shape
    _, _, kv_heads, block_size, _ = kv_cache.shape
    full = q.dtype is torch.float32
    padded = max(16, triton.next_power_of_2(head_size))
    size = block_m(num_heads // kv_heads, q.dtype)
    limit = queries_per_block(num_heads // kv_heads, q.dtype)
    assert queries is None or queries <= limit, f"{queries} queries in a block of {limit}"
    large = full and size * padded > 4096  # more than the registers of four warps hold
    options = {"num_warps": warps or (4 if full and not large else 8), "num_stages": stages or (2 if full else 3)}
    if not full and padded <= 128:
        # Two blocks of queries on a multiprocessor: one's softmax overlaps the other's products.
        options["maxnreg"] = 128
    _prefill_kernel[(kv_heads * query_blocks.shape[0],)](
        q, out, kv_cache, query_blocks, rows, query_start, seq_lens, block_table, block_table.stride(0),
        features.slopes if features.slopes is not None else q, features.sinks if features.sinks is not None else q,
        score_scale(features), features.softcap or 0.0,
        H=num_heads, KV=kv_heads, D=head_size, DP=padded, BLOCK_SIZE=block_size,
        BLOCK_M=size, QUERIES=queries or limit, TILE=tile or (16 if large else 32 if full else 64),
        WINDOW=features.window or 0, **feature_flags(features), **scale_arguments(features, kv_cache),
        **options, **early_launch(q),
    )  # fmt: skip
