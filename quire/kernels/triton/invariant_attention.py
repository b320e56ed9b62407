"""Attention whose result for a query depends on its keys alone: not on chunks, cached prefixes, splits or other rows.

Keys fall into parts at fixed places: 16 of 256, then 16 of 4,096, the last of any length. A part is summed by itself,
in tiles that begin at multiples of their size, and parts are folded in order: by the program that computed them, or, of
decode rows, by the last of several, which finds them in memory. A tile or part that a query does not see leaves its
sums as they are, to the bit.

Prompts and decode rows are served by the same instructions (those of 16 rows, which waste least on a decode row), and
all that is summed is summed by them, so that tiles of queries may have different heights. No product and sum are
contracted, which would depend on the context.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.dispatch import early_launch
from quire.kernels.paged_attention import AttentionFeatures, AttentionShape
from quire.kernels.triton.attend import attend, feature_flags, scale_arguments, score_scale, start
from quire.kernels.triton.paged_decode import MAX_PROGRAMS
from quire.kernels.workspace import Workspace

SHORT, COUNT, LONG = tl.constexpr(256), tl.constexpr(16), tl.constexpr(4096)
MAX_PARTS = 32
SPLIT_ROWS = 256  # of decode steps with more, a program has a whole row


@triton.jit
def _part_of(key):
    return tl.minimum(tl.where(key < COUNT * SHORT, key // SHORT, COUNT + (key - COUNT * SHORT) // LONG), 2 * COUNT - 1)


@triton.jit
def _begin_of(part):
    return tl.where(part <= COUNT, part * SHORT, COUNT * SHORT + (part - COUNT) * LONG)


@triton.jit
def _fold(acc, max_score, total, part_acc, part_max, part_total):
    """Add a part to those before it; one without visible keys changes nothing."""
    new_max = tl.maximum(max_score, part_max)
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    old, new = tl.math.exp2(max_score - base), tl.math.exp2(part_max - base)
    return acc * old[:, None] + part_acc * new[:, None], new_max, total * old + part_total * new


@triton.jit(do_not_specialize=["splits", "table_stride"])
def _invariant_kernel(
    q,  # [N, H, D]
    out,  # [N, H, D]
    kv_cache,
    query_blocks,  # [blocks of queries, 2]: row of the batch (-1: nothing to do), first query in it; unused if DECODE
    rows,
    query_start,
    seq_lens,
    block_table,
    table_stride,
    partial_out,  # [units, MAX_PARTS, G, D] float32; a unit is a row's KV head
    partial_sum,  # [units, MAX_PARTS, G, 2] float32: maximum score, sum of weights
    arrived,  # [units] int32: zero before and after
    slopes,
    sinks,
    scale,
    softcap,
    token_scales,
    v_scale,
    splits,  # programs that share a row's parts; 1 without DECODE
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    QUERIES: tl.constexpr,  # of a block
    TILE: tl.constexpr,
    DECODE: tl.constexpr,  # a program for rows of one query
    DECODE_ONLY: tl.constexpr,  # every row has one query
    SPLIT: tl.constexpr,  # splits > 1
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    PAGE: tl.constexpr,
    SCALE_PAGE: tl.constexpr,
    V_SCALED: tl.constexpr,  # values are those in the cache times v_scale
    MAX_PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    G: tl.constexpr = H // KV
    # One grid dimension: the others are limited to 65,535.
    kv_head, index = tl.program_id(0) % KV, tl.program_id(0) // KV
    split = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    i, first, token, num_queries = index, 0, index, 1
    if not DECODE:
        i = tl.load(query_blocks + 2 * index)
        if i < 0:
            return
        first = tl.load(query_blocks + 2 * index + 1)
    if not DECODE_ONLY:
        token = tl.load(query_start + i)
        num_queries = tl.load(query_start + i + 1) - token
        if DECODE and num_queries != 1:
            return
    context = tl.load(seq_lens + i) - num_queries
    # Padding rows are row -1 with no keys; their table must not be read.
    pages = block_table + tl.maximum(tl.load(rows + i), 0).to(tl.int64) * table_stride

    m = tl.arange(0, BLOCK_M)
    query = first + m // G
    head = kv_head * G + m % G
    real = (m < QUERIES * G) & (query < num_queries)
    columns = tl.arange(0, DP)
    at = ((token + query).to(tl.int64) * H + head)[:, None] * D + columns[None, :]
    here = real[:, None] & (columns < D)[None, :]
    vectors = tl.load(q + at, mask=here, other=0.0)
    q_pos = context + query
    slope = tl.load(slopes + head, mask=real, other=0.0) if ALIBI else tl.zeros([BLOCK_M], tl.float32)

    end = tl.maximum(0, context + tl.minimum(first + QUERIES, num_queries))
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(0, context + first - WINDOW + 1) // TILE * TILE
    first_part = _part_of(begin)
    num_parts = tl.maximum(1, _part_of(tl.maximum(end - 1, 0)) + 1 - first_part)
    used = tl.minimum(splits, num_parts)
    if split >= used:
        return
    unit = index.to(tl.int64) * KV + kv_head
    acc, max_score, total = start(sinks, head, real, BLOCK_M, DP, SINKS)
    for part in range(first_part + split, first_part + num_parts, splits):
        part_begin = tl.maximum(_begin_of(part), begin)
        part_end = end
        if part < MAX_PARTS - 1:
            part_end = tl.minimum(_begin_of(part + 1), end)
        part_acc, part_max, part_total = start(sinks, head, real, BLOCK_M, DP, False)
        masked_from = part_begin
        if WINDOW == 0:
            # Whole tiles that even the first query sees need no mask; without one their bits are the same.
            seen = tl.minimum(part_end, context + first + 1)
            masked_from = part_begin + tl.maximum(seen - part_begin, 0) // TILE * TILE
            part_acc, part_max, part_total = attend(
                vectors, part_acc, part_max, part_total, kv_cache, pages, kv_head, part_begin, masked_from, q_pos,
                slope, scale, softcap, token_scales, KV, D, DP, BLOCK_SIZE, TILE, False, 0, SOFTCAP, ALIBI, PAGE,
                SCALE_PAGE, ORDERED=True,
            )  # fmt: skip
        part_acc, part_max, part_total = attend(
            vectors, part_acc, part_max, part_total, kv_cache, pages, kv_head, masked_from, part_end, q_pos, slope,
            scale, softcap, token_scales, KV, D, DP, BLOCK_SIZE, TILE, True, WINDOW, SOFTCAP, ALIBI, PAGE, SCALE_PAGE,
            ORDERED=True,
        )  # fmt: skip
        if SPLIT and num_parts > 1:
            place = (unit * MAX_PARTS + part - first_part) * G + m
            tl.store(partial_out + place[:, None] * D + columns[None, :], part_acc, mask=here)
            tl.store(partial_sum + place * 2, part_max, mask=real)
            tl.store(partial_sum + place * 2 + 1, part_total, mask=real)
        else:
            acc, max_score, total = _fold(acc, max_score, total, part_acc, part_max, part_total)
    if SPLIT and num_parts > 1:
        tl.debug_barrier()  # every thread's part must be written before the split counts as arrived
        if tl.atomic_add(arrived + unit, 1, sem="acq_rel") != used - 1:
            return
        tl.store(arrived + unit, 0)
        for j in range(0, num_parts):
            place = (unit * MAX_PARTS + j) * G + m
            found = tl.load(
                partial_out + place[:, None] * D + columns[None, :], mask=here, other=0.0, cache_modifier=".cg"
            )
            part_max = tl.load(partial_sum + place * 2, mask=real, other=float("-inf"), cache_modifier=".cg")
            part_total = tl.load(partial_sum + place * 2 + 1, mask=real, other=0.0, cache_modifier=".cg")
            acc, max_score, total = _fold(acc, max_score, total, found, part_max, part_total)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if V_SCALED:
        acc *= v_scale
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=here)


class PartsWorkspace(Workspace):
    """Sums of parts, for as many rows as several programs share."""

    def __init__(self, max_rows: int, shapes: Sequence[AttentionShape], device: torch.device) -> None:
        super().__init__(device)
        units = min(max_rows, SPLIT_ROWS) * max(s.num_kv_heads for s in shapes)
        sums = units * MAX_PARTS * max(s.group for s in shapes)
        self.partial_out = torch.empty(sums * max(s.head_size for s in shapes), dtype=torch.float32, device=device)
        self.partial_sum = torch.empty(sums * 2, dtype=torch.float32, device=device)
        self.arrived = self.new_counters(units)


def queries_per_block(group: int, dtype: torch.dtype) -> int:
    return _height(group, dtype, decode=False) // group


def _height(group: int, dtype: torch.dtype, decode: bool) -> int:
    """Of a tile of queries."""
    return max(16 if decode or dtype is torch.float32 else 32, triton.next_power_of_2(group))


def _warps(height: int, padded_head: int) -> int:
    """Triton has other instructions for products of 64 rows, unless warps are fewer than four."""
    if height >= 64:
        return 2
    return height // 8 * (2 if padded_head > 128 else 1)


def invariant_attention(
    q: torch.Tensor,
    out: torch.Tensor,
    kv_cache: torch.Tensor,
    query_blocks: torch.Tensor | None,  # None: for the rows of one query
    rows: torch.Tensor,
    query_start: torch.Tensor | None,  # None: all rows are of one query, and token i is row i's
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    workspace: PartsWorkspace,
    features: AttentionFeatures,
    queries: int = 1,
    splits: int | None = None,
    warps: int | None = None,
) -> None:
    """Fills `out` for the queries of `query_blocks`, or of rows of one. `splits`: programs of a decode row; neither it
    nor `warps` changes the result."""
    _, num_heads, head_size = q.shape
    _, _, kv_heads, block_size, _ = kv_cache.shape
    full, decode = q.dtype is torch.float32, query_blocks is None
    padded = max(16, triton.next_power_of_2(head_size))
    count = len(rows) if query_blocks is None else len(query_blocks)
    if not decode:
        splits = 1
    elif splits is None:
        splits = max(1, min(MAX_PARTS, MAX_PROGRAMS // (count * kv_heads))) if count <= SPLIT_ROWS else 1
    height = _height(num_heads // kv_heads, q.dtype, decode)
    _invariant_kernel[(count * kv_heads, splits)](
        q, out, kv_cache, query_blocks if query_blocks is not None else rows, rows,
        query_start if query_start is not None else rows, seq_lens, block_table, block_table.stride(0),
        workspace.partial_out, workspace.partial_sum, workspace.arrived,
        features.slopes if features.slopes is not None else q, features.sinks if features.sinks is not None else q,
        score_scale(features), features.softcap or 0.0, splits=splits,
        H=num_heads, KV=kv_heads, D=head_size, DP=padded, BLOCK_SIZE=block_size,
        BLOCK_M=height, QUERIES=queries, TILE=16 if full else 64,
        DECODE=decode, DECODE_ONLY=query_start is None, SPLIT=splits > 1, MAX_PARTS=MAX_PARTS,
        WINDOW=features.window or 0, **feature_flags(features), **scale_arguments(features, kv_cache),
        num_warps=warps or (8 if full and padded > 128 else 4 if full else _warps(height, padded)),
        num_stages=2 if full else 3,
        enable_fp_fusion=False, **early_launch(q),
    )  # fmt: skip
