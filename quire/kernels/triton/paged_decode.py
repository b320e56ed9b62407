"""Decode attention: rows of one query token. Programs split a row's keys; the last to finish combines the parts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.dispatch import early_launch
from quire.kernels.paged_attention import AttentionFeatures, AttentionShape
from quire.kernels.triton.attend import attend, feature_flags, scale_arguments, score_scale, start
from quire.kernels.workspace import Workspace


@dataclass(frozen=True)
class Tuning:
    tile: int = 64
    warps: int = 4
    stages: int = 3
    min_tiles: int = 1  # of a split: shorter ones cost more to combine than they save
    two_loops: bool = True
    programs: int = 1056  # target: several waves, so that a partly idle last one costs little


FLOAT32 = Tuning(tile=32, stages=2)
MAX_SPLITS = 64
MAX_PROGRAMS = 8192
PREFIX_SPLITS = 8
# In a mixed step, rows of one token are few among those it is padded to.
MIXED_SPLITS, MIXED_ROWS = 8, 64


def tuning_for(num_rows: int, group: int, padded_head: int, dtype: torch.dtype) -> Tuning:
    """By measurement on an H200 (benchmarks/gpu/attention.py), as far as registers suffice."""
    tuning, sums = measured_tuning(num_rows, group, dtype), padded_group(group) * padded_head
    if sums <= 2048:
        return tuning
    tile = min(tuning.tile, 16 if dtype is torch.float32 else 64)
    return replace(tuning, tile=tile, warps=max(tuning.warps, 4 if sums <= 4096 else 8))


def padded_group(group: int) -> int:
    """To the smallest size of a matrix product."""
    return max(16, triton.next_power_of_2(group))


def measured_tuning(num_rows: int, group: int, dtype: torch.dtype) -> Tuning:
    if dtype is torch.float32:
        return FLOAT32
    if num_rows <= 8:
        return Tuning(64, warps=2, stages=3, two_loops=False, programs=528)
    if num_rows <= 48:
        return Tuning(128, warps=4, stages=2, programs=528)
    if group > 2:  # each part is larger to combine: fewer of them
        return Tuning(128, warps=4, stages=2, min_tiles=4, programs=2048)
    # Several splits each, so that rows of uneven length end together.
    return Tuning(64, warps=2, stages=3, min_tiles=4, programs=MAX_PROGRAMS)


@triton.jit(do_not_specialize=["splits", "table_stride"])
def _decode_kernel(
    q,  # [N, H, D]
    out,  # [N, H, D]
    kv_cache,
    rows,
    query_start,
    seq_lens,
    block_table,
    table_stride,
    prefix_len,  # [1]: leading keys, handled by the shared-prefix kernel
    partial_out,  # [n, KV, splits + PREFIX_SPLITS, G, D] float32
    partial_sum,  # [n, KV, splits + PREFIX_SPLITS, G, 2] float32: maximum score, sum of weights
    arrived,  # [n, KV] int32: zero before and after
    slopes,
    sinks,
    scale,
    softcap,
    token_scales,
    v_scale,
    splits,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GP: tl.constexpr,  # the group, padded to the smallest size of a matrix product
    GM: tl.constexpr,  # the group, padded to a power of two
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    PREFIX_SPLITS: tl.constexpr,  # 0: no shared prefix
    DECODE_ONLY: tl.constexpr,  # every row has one query
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    PAGE: tl.constexpr,
    SCALE_PAGE: tl.constexpr,
    V_SCALED: tl.constexpr,  # values are those in the cache times v_scale
    TWO_LOOPS: tl.constexpr,  # whole tiles first, without a mask
    PDL: tl.constexpr,
):
    G: tl.constexpr = H // KV
    parts = splits + PREFIX_SPLITS
    split, kv_head, i = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = i
    if not DECODE_ONLY:
        token = tl.load(query_start + i)
        if tl.load(query_start + i + 1) - token != 1:
            return
    length = tl.load(seq_lens + i)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(0, length - WINDOW)
    if PREFIX_SPLITS > 0:
        first = tl.minimum(tl.load(prefix_len), length)
    tiles = tl.cdiv(length - first, TILE)
    tiles_per_split = tl.maximum(tl.cdiv(tiles, splits), MIN_TILES)
    used_splits = tl.maximum(1, tl.cdiv(tiles, tiles_per_split))
    if split >= used_splits:
        return

    g = tl.arange(0, GP)
    head = kv_head * G + g
    columns = tl.arange(0, DP)
    here = (g < G)[:, None] & (columns < D)[None, :]
    at = (token.to(tl.int64) * H + head)[:, None] * D + columns[None, :]
    vectors = tl.load(q + at, mask=here, other=0.0)
    slope = tl.load(slopes + head, mask=g < G, other=0.0) if ALIBI else tl.zeros([GP], tl.float32)
    # Padding rows are row -1 with no keys; their table must not be read.
    pages = block_table + tl.maximum(tl.load(rows + i), 0).to(tl.int64) * table_stride
    q_pos = tl.zeros([GP], tl.int32) + (length - 1)
    begin = first + split * tiles_per_split * TILE
    end = tl.minimum(begin + tiles_per_split * TILE, length)
    # A sink counts in the first split alone, which every row has.
    acc, max_score, total = start(sinks, head, (g < G) & (split == 0), GP, DP, SINKS)
    masked_from = begin
    if TWO_LOOPS:
        masked_from = begin + (tl.maximum(end - begin, 0) // TILE) * TILE
        acc, max_score, total = attend(
            vectors, acc, max_score, total, kv_cache, pages, kv_head, begin, masked_from, q_pos, slope, scale, softcap,
            token_scales, KV, D, DP, BLOCK_SIZE, TILE, False, 0, SOFTCAP, ALIBI, PAGE, SCALE_PAGE,
        )  # fmt: skip
    acc, max_score, total = attend(
        vectors, acc, max_score, total, kv_cache, pages, kv_head, masked_from, end, q_pos, slope, scale, softcap,
        token_scales, KV, D, DP, BLOCK_SIZE, TILE, True, WINDOW, SOFTCAP, ALIBI, PAGE, SCALE_PAGE,
    )  # fmt: skip

    if (PREFIX_SPLITS == 0) & (used_splits == 1):
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        if V_SCALED:
            acc *= v_scale
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=here)
        return
    unit = (i * KV + kv_head).to(tl.int64)
    place = (unit * parts + split) * G + g
    tl.store(partial_out + place[:, None] * D + columns[None, :], acc, mask=here)
    tl.store(partial_sum + place * 2, max_score, mask=g < G)
    tl.store(partial_sum + place * 2 + 1, total, mask=g < G)
    tl.debug_barrier()  # every thread's part must be written before the split counts as arrived
    if tl.atomic_add(arrived + unit, 1, sem="acq_rel") == used_splits - 1:
        _combine_splits(
            out, partial_out, partial_sum, unit, token, kv_head, v_scale, splits, used_splits, H, G, D, DP, GM,
            PREFIX_SPLITS, V_SCALED,
        )  # fmt: skip
        tl.store(arrived + unit, 0)


@triton.jit
def _combine_splits(
    out,
    partial_out,
    partial_sum,
    unit,
    token,
    kv_head,
    v_scale,
    splits,
    used_splits,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    GM: tl.constexpr,  # the group, padded to a power of two
    PREFIX_SPLITS: tl.constexpr,
    V_SCALED: tl.constexpr,
):
    """Combine the parts of one row and KV head, several at a time but in order of position: the result must not depend
    on which program came last."""
    AT_ONCE: tl.constexpr = 8 if GM * DP <= 512 else 2
    g = tl.arange(0, GM)
    columns = tl.arange(0, DP)
    here = (g < G)[:, None] & (columns < D)[None, :]
    acc = tl.zeros([GM, DP], tl.float32)
    max_score = tl.full([GM], float("-inf"), tl.float32)
    total = tl.zeros([GM], tl.float32)
    count = PREFIX_SPLITS + used_splits
    for first in range(0, count, AT_ONCE):
        j = first + tl.arange(0, AT_ONCE)
        part = tl.where(j < PREFIX_SPLITS, splits + j, j - PREFIX_SPLITS)
        place = (unit * (splits + PREFIX_SPLITS) + part)[:, None] * G + g[None, :]
        real = (j < count)[:, None] & (g < G)[None, :]
        part_max = tl.load(partial_sum + place * 2, mask=real, other=float("-inf"), cache_modifier=".cg")
        part_total = tl.load(partial_sum + place * 2 + 1, mask=real, other=0.0, cache_modifier=".cg")
        part_acc = tl.load(
            partial_out + place[:, :, None] * D + columns[None, None, :],
            mask=(j < count)[:, None, None] & here[None, :, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_max = tl.maximum(max_score, tl.max(part_max, 0))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        old, new = tl.math.exp2(max_score - base), tl.math.exp2(part_max - base[None, :])
        acc = acc * old[:, None] + tl.sum(part_acc * new[:, :, None], 0)
        total = total * old + tl.sum(part_total * new, 0)
        max_score = new_max
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if V_SCALED:
        acc *= v_scale
    at = (token.to(tl.int64) * H + kv_head * G + g)[:, None] * D + columns[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["splits", "num_rows", "table_stride"])
def _shared_prefix_kernel(
    q,
    kv_cache,
    rows,
    seq_lens,
    block_table,
    table_stride,
    prefix_len,
    partial_out,
    partial_sum,
    num_rows,
    slopes,
    scale,
    softcap,
    token_scales,
    v_scale,
    splits,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    PREFIX_SPLITS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    PAGE: tl.constexpr,
    SCALE_PAGE: tl.constexpr,
    V_SCALED: tl.constexpr,  # left to the kernel that combines the parts
    PDL: tl.constexpr,
):
    """The prefix that all rows share, for many rows at once: its keys are read once instead of once per row."""
    G: tl.constexpr = H // KV
    QUERIES: tl.constexpr = BLOCK_M // G
    block, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m = tl.arange(0, BLOCK_M)
    i = block * QUERIES + m // G
    head = kv_head * G + m % G
    real = (m < QUERIES * G) & (i < num_rows)
    columns = tl.arange(0, DP)
    here = real[:, None] & (columns < D)[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    vectors = tl.load(q + (i.to(tl.int64) * H + head)[:, None] * D + columns[None, :], mask=here, other=0.0)
    pages = block_table + tl.load(rows).to(tl.int64) * table_stride
    length = tl.load(prefix_len)
    share = tl.cdiv(tl.cdiv(length, TILE), PREFIX_SPLITS) * TILE
    begin = split * share
    end = tl.minimum(begin + share, length)
    whole = begin + (tl.maximum(end - begin, 0) // TILE) * TILE
    # All of it is visible to every row; the distance matters only to ALiBi.
    q_pos = tl.zeros([BLOCK_M], tl.int32) + (length - 1)
    slope = tl.zeros([BLOCK_M], tl.float32)
    if ALIBI:
        q_pos = tl.maximum(q_pos, tl.load(seq_lens + i, mask=real, other=0) - 1)
        slope = tl.load(slopes + head, mask=real, other=0.0)
    acc, max_score, total = start(q, head, real, BLOCK_M, DP, False)  # the rest of each row counts its sink
    acc, max_score, total = attend(
        vectors, acc, max_score, total, kv_cache, pages, kv_head, begin, whole, q_pos, slope, scale, softcap,
        token_scales, KV, D, DP, BLOCK_SIZE, TILE, False, 0, SOFTCAP, ALIBI, PAGE, SCALE_PAGE,
    )  # fmt: skip
    acc, max_score, total = attend(
        vectors, acc, max_score, total, kv_cache, pages, kv_head, whole, end, q_pos, slope, scale, softcap,
        token_scales, KV, D, DP, BLOCK_SIZE, TILE, True, 0, SOFTCAP, ALIBI, PAGE, SCALE_PAGE,
    )  # fmt: skip
    unit = i.to(tl.int64) * KV + kv_head
    place = (unit * (splits + PREFIX_SPLITS) + splits + split) * G + m % G
    tl.store(partial_out + place[:, None] * D + columns[None, :], acc, mask=here)
    tl.store(partial_sum + place * 2, max_score, mask=real)
    tl.store(partial_sum + place * 2 + 1, total, mask=real)


class DecodeWorkspace(Workspace):
    """Partial results of splits. One for all layers, which run one after the other, and large enough for each."""

    def __init__(self, max_rows: int, shapes: Sequence[AttentionShape], device: torch.device) -> None:
        super().__init__(device)
        parts = {s: max_parts(max_rows, s.num_kv_heads) for s in shapes}
        out_size = max(count * s.num_heads * s.head_size for s, count in parts.items())
        sum_size = max(count * s.num_heads * 2 for s, count in parts.items())
        self.partial_out = torch.empty(out_size, dtype=torch.float32, device=device)
        self.partial_sum = torch.empty(sum_size, dtype=torch.float32, device=device)
        max_kv_heads = max(s.num_kv_heads for s in shapes)
        self.arrived = self.new_counters(max_rows * max_kv_heads)


def max_parts(max_rows: int, num_kv_heads: int) -> int:
    """The most partial results of all rows for one KV head, over steps of any number of rows."""
    parts = max((num_splits(n, num_kv_heads, MAX_PROGRAMS) + PREFIX_SPLITS) * n for n in range(1, max_rows + 1))
    return max(parts, MIXED_SPLITS * MIXED_ROWS)


def num_splits(num_rows: int, num_kv_heads: int, programs: int) -> int:
    return max(1, min(MAX_SPLITS, -(-programs // (num_rows * num_kv_heads))))


def paged_decode(
    q: torch.Tensor,
    out: torch.Tensor,
    kv_cache: torch.Tensor,
    rows: torch.Tensor,
    query_start: torch.Tensor | None,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    workspace: DecodeWorkspace,
    features: AttentionFeatures,
    prefix_len: torch.Tensor | None = None,
    tuning: Tuning | None = None,
) -> None:
    """Fills `out` for rows of one query. Without `query_start` all rows are: token i is row i's.

    `prefix_len` [1]: leading keys in pages that all rows share, attended to for all of them at once.
    """
    num_rows, (_, num_heads, head_size) = len(rows), q.shape
    _, _, kv_heads, block_size, _ = kv_cache.shape
    group = num_heads // kv_heads
    full = q.dtype is torch.float32
    padded = max(16, triton.next_power_of_2(head_size))
    # In a mixed step, rows of one token use the kernel of the largest step, whatever their number.
    tuning = tuning or tuning_for(num_rows if query_start is None else MIXED_ROWS, group, padded, q.dtype)
    # After a shared prefix, a row's own keys are few.
    splits = num_splits(num_rows, kv_heads, tuning.programs if prefix_len is None else Tuning.programs)
    if query_start is not None and num_rows <= MIXED_ROWS:
        splits = max(splits, MIXED_SPLITS)
    prefix_splits = PREFIX_SPLITS if prefix_len is not None else 0
    shape = dict(
        H=num_heads, KV=kv_heads, D=head_size, DP=padded, BLOCK_SIZE=block_size, TILE=tuning.tile,
        PREFIX_SPLITS=prefix_splits,
    )  # fmt: skip
    has = feature_flags(features)
    slopes = features.slopes if features.slopes is not None else q
    sinks = features.sinks if features.sinks is not None else q
    scale, softcap = score_scale(features), features.softcap or 0.0
    scales = scale_arguments(features, kv_cache)
    if prefix_len is not None:
        assert query_start is None and features.window is None
        block_m = max(32 if full else 128, triton.next_power_of_2(group))
        _shared_prefix_kernel[(triton.cdiv(num_rows, block_m // group), kv_heads, prefix_splits)](
            q, kv_cache, rows, seq_lens, block_table, block_table.stride(0), prefix_len,
            workspace.partial_out, workspace.partial_sum, num_rows, slopes, scale, softcap, splits=splits,
            BLOCK_M=block_m, SOFTCAP=has["SOFTCAP"], ALIBI=has["ALIBI"],
            num_warps=8 if block_m * padded > (4096 if full else 16384) else 4, num_stages=2 if full else 3,
            **shape, **scales, **early_launch(q),
        )  # fmt: skip
    _decode_kernel[(splits, kv_heads, num_rows)](
        q, out, kv_cache, rows, query_start if query_start is not None else rows, seq_lens,
        block_table, block_table.stride(0), prefix_len if prefix_len is not None else rows,
        workspace.partial_out, workspace.partial_sum, workspace.arrived,
        slopes, sinks, scale, softcap, splits=splits,
        GP=padded_group(group), GM=triton.next_power_of_2(group),
        MIN_TILES=tuning.min_tiles, TWO_LOOPS=tuning.two_loops, DECODE_ONLY=query_start is None,
        WINDOW=features.window or 0, **has,
        num_warps=tuning.warps, num_stages=tuning.stages, **shape, **scales, **early_launch(q),
    )  # fmt: skip
