"""Decode attention over latent pages: a program has a tile of heads, for all queries of a row, and a split of its keys.

Parts of splits are combined where they are multiplied next (latent_product.py): a part is 512 numbers for each head,
too many for one program to combine those of all heads.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.dispatch import early_launch
from quire.kernels.kv_scales import KVScales
from quire.kernels.triton.latent_attend import LOG2E, latent_attend, load_queries, padded, page_arguments
from quire.kernels.triton.latent_product import Parts

MAX_SPLITS = 64
# In a mixed step, rows of one token are few among those it is padded to.
MIXED_SPLITS, MIXED_ROWS = 8, 64
MULTIPROCESSORS = 132
MIN_USE = 0.9  # of multiprocessors, for which keys are split further
# Many rows are split so that those of uneven length end together, but not into parts that cost more than they save.
MANY_WAVES, MANY_MIN_KEYS = 4, 256
MAX_SHARED = 227 << 10


@dataclass(frozen=True)
class Tuning:
    tile: int = 64  # keys: the rows of a matrix instruction
    warps: int = 4
    stages: int = 2  # of 3, one is loaded while one is multiplied; of 2, none
    per_multiprocessor: int = 1  # programs
    min_keys: int | None = None  # of a split of many rows; default: MANY_MIN_KEYS


FLOAT32 = Tuning(tile=16, stages=1)


def tuning_for(columns: int, dtype: torch.dtype, quantized: bool = False, rank: int = 512, rope: int = 64) -> Tuning:
    """`columns`: heads x queries of a program. Sums of more, or a tile that is converted, need registers of more warps.
    Three stages if shared memory holds them."""
    if dtype is torch.float32:
        return FLOAT32
    if quantized:
        return Tuning(warps=8, stages=3)
    if columns <= 16:  # two programs side by side: one loads while the other multiplies
        return Tuning(32, stages=3, per_multiprocessor=2)
    rank, rope, tile = *(max(16, triton.next_power_of_2(size)) for size in (rank, rope)), Tuning.tile
    # Queries, weights of a tile, and its keys.
    used = 2 * (columns * (rank + rope) + tile * columns + 3 * tile * (rank + rope))
    return Tuning(warps=8, stages=3 if used < MAX_SHARED - 1024 else 2)


def tile_of_heads(num_heads: int, queries: int, dtype: torch.dtype) -> tuple[int, int]:
    """Heads of a program and its columns: heads x queries, padded."""
    most = 16 if dtype is torch.float32 else 64
    heads = num_heads
    while heads > 1 and heads * queries > most:
        heads = -(-heads // 2)
    return heads, max(16, triton.next_power_of_2(heads * queries))


@cache
def split_keys(programs: int, at_once: int, tiles: int) -> tuple[int, int]:
    """The most splits of the keys of each of so many programs, `at_once` of which run at the same time, and the fewest
    tiles of a split: `tiles` if programs are many. Few programs are split as often as uses most of these."""
    if 2 * programs > at_once:
        return min(MAX_SPLITS, -(-MANY_WAVES * at_once // programs)), tiles
    use = [programs * n / (-(-programs * n // at_once) * at_once) for n in range(1, MAX_SPLITS + 1)]
    enough = [n for n, part in enumerate(use, 1) if part >= MIN_USE]
    return enough[0] if enough else 1 + use.index(max(use)), 1


@triton.jit(do_not_specialize=["splits", "min_tiles", "prefix_splits", "table_stride"])
def _decode_kernel(
    q,  # [N, H, RANK]
    q_rope,  # [N, H, ROPE], with strides of its own
    kv_cache,
    rows,  # [n, Q]
    query_start,
    seq_lens,  # [n, Q]
    block_table,
    table_stride,
    prefix_len,  # [1]: leading keys, handled by the shared-prefix kernel
    out,  # of Parts
    sums,
    counts,
    factor,
    token_scales,
    cache_scale,
    splits,
    min_tiles,  # of a split
    prefix_splits,
    rope_token,
    rope_head,
    H: tl.constexpr,
    HB: tl.constexpr,  # heads of a program
    Q: tl.constexpr,  # queries of a row
    M: tl.constexpr,  # HB * Q, padded
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
    PREFIX: tl.constexpr,  # whether there is a shared one
    DECODE_ONLY: tl.constexpr,  # every row has Q queries; otherwise those of one are attended to
    PDL: tl.constexpr,
):
    # Rows' first splits start first: later ones, which most rows do not have, end at once.
    i, split = tl.program_id(0), tl.program_id(2)
    m = tl.arange(0, M)
    query, head = m // HB, tl.program_id(1) * HB + m % HB
    real = (query < Q) & (head < H)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    unit = i * Q + query
    token = unit
    if not DECODE_ONLY:
        first_token = tl.load(query_start + i)
        if tl.load(query_start + i + 1) - first_token != 1:
            if (split == 0) & (tl.program_id(1) == 0):
                tl.store(counts + i, 0)
            return
        token = tl.zeros_like(unit) + first_token
    lengths = tl.load(seq_lens + unit, mask=real, other=0)
    length = tl.load(seq_lens + i * Q + Q - 1)
    first = 0
    if PREFIX:
        first = tl.minimum(tl.load(prefix_len), length)
    tiles = tl.cdiv(length - first, TILE)
    tiles_per_split = tl.cdiv(tiles, tl.maximum(1, tl.minimum(splits, tiles // min_tiles)))
    used_splits = tl.maximum(1, tl.cdiv(tiles, tl.maximum(1, tiles_per_split)))
    if split >= used_splits:
        return
    if (split == 0) & (tl.program_id(1) == 0):
        tl.store(counts + unit, prefix_splits + used_splits, mask=real & (m % HB == 0))

    vectors, turned, q_at = load_queries(
        q, unit, q_rope, token, rope_token, rope_head, head, real, H, RANK, ROPE, RP, PP, CHUNK
    )  # fmt: skip
    # Padding rows are row -1 with no keys; their table must not be read.
    pages = block_table + tl.maximum(tl.load(rows + i * Q), 0).to(tl.int64) * table_stride
    begin = first + split * tiles_per_split * TILE
    end = tl.minimum(begin + tiles_per_split * TILE, length)
    acc = tl.zeros([RP, M], tl.float32)
    max_score = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([TILE, M], tl.float32)
    # All tiles are masked, though only the last need it: a loop of its own would start with nothing in flight.
    acc, max_score, total = latent_attend(
        vectors, turned, q_at, acc, max_score, total, kv_cache, pages, begin, end, lengths, factor,
        token_scales, cache_scale, RANK, ROPE, RP, PP, CHUNK, BLOCK_SIZE, PAGE, SCALE_PAGE, QUANTIZED, TILE, True,
    )  # fmt: skip
    part = (unit.to(tl.int64) * H + head) * (prefix_splits + splits) + prefix_splits + split
    _store_part(out, sums, acc, max_score, total, part, real, RANK, RP)


@triton.jit
def _store_part(out, sums, acc, max_score, total, part, real, RANK: tl.constexpr, RP: tl.constexpr):
    columns = tl.arange(0, RP)
    here = real[None, :] & (columns < RANK)[:, None]
    tl.store(out + part[None, :] * RANK + columns[:, None], acc, mask=here)
    tl.store(sums + part * 2, max_score, mask=real)
    tl.store(sums + part * 2 + 1, tl.sum(total, 0), mask=real)


@triton.jit(do_not_specialize=["splits", "prefix_splits", "num_tokens", "table_stride"])
def _shared_prefix_kernel(
    q,
    q_rope,
    kv_cache,
    rows,
    block_table,
    table_stride,
    prefix_len,
    out,
    sums,
    num_tokens,
    factor,
    token_scales,
    cache_scale,
    splits,
    prefix_splits,
    rope_token,
    rope_head,
    H: tl.constexpr,
    M: tl.constexpr,
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
    """The prefix that all rows share, for M heads of any rows at once: its keys are read once for these."""
    m = tl.program_id(0) * M + tl.arange(0, M)
    token, head = m // H, m % H
    split = tl.program_id(1)
    real = token < num_tokens
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    vectors, turned, q_at = load_queries(
        q, token, q_rope, token, rope_token, rope_head, head, real, H, RANK, ROPE, RP, PP, CHUNK
    )  # fmt: skip
    pages = block_table + tl.maximum(tl.load(rows), 0).to(tl.int64) * table_stride
    length = tl.load(prefix_len)
    share = tl.cdiv(tl.cdiv(length, TILE), prefix_splits) * TILE
    begin = split * share
    end = tl.minimum(begin + share, length)
    whole = begin + (tl.maximum(end - begin, 0) // TILE) * TILE
    lengths = tl.zeros([M], tl.int32) + length
    acc = tl.zeros([RP, M], tl.float32)
    max_score = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([TILE, M], tl.float32)
    acc, max_score, total = latent_attend(
        vectors, turned, q_at, acc, max_score, total, kv_cache, pages, begin, whole, lengths, factor,
        token_scales, cache_scale, RANK, ROPE, RP, PP, CHUNK, BLOCK_SIZE, PAGE, SCALE_PAGE, QUANTIZED, TILE, False,
    )  # fmt: skip
    acc, max_score, total = latent_attend(
        vectors, turned, q_at, acc, max_score, total, kv_cache, pages, whole, end, lengths, factor,
        token_scales, cache_scale, RANK, ROPE, RP, PP, CHUNK, BLOCK_SIZE, PAGE, SCALE_PAGE, QUANTIZED, TILE, True,
    )  # fmt: skip
    part = (token.to(tl.int64) * H + head) * (prefix_splits + splits) + split
    _store_part(out, sums, acc, max_score, total, part, real, RANK, RP)


def latent_decode(
    q: torch.Tensor,  # [units, H, rank]: queries in the latent space
    q_rope: torch.Tensor,  # [N, H, rope]: their rotated part
    kv_cache: torch.Tensor,  # [pages, page_tokens, rank + rope]
    rows: torch.Tensor,  # [units]
    query_start: torch.Tensor | None,
    seq_lens: torch.Tensor,  # [units]
    block_table: torch.Tensor,
    scale: float,
    scales: KVScales | None = None,
    queries: int = 1,
    prefix_len: torch.Tensor | None = None,
    tuning: Tuning | None = None,
) -> Parts:
    """Of rows of `queries` tokens, each of which is a unit with a length of its own. With `query_start`, units are rows
    of any number of tokens, and those of one are attended to.

    `prefix_len` [1]: leading keys in pages that all rows share, attended to for all of them at once.
    """
    units, num_heads, rank = q.shape
    heads, columns = tile_of_heads(num_heads, queries, q.dtype)
    tuning = tuning or tuning_for(columns, q.dtype, scales is not None, rank, q_rope.shape[2])
    tiles, at_once = triton.cdiv(num_heads, heads), MULTIPROCESSORS * tuning.per_multiprocessor
    min_keys = tuning.min_keys or MANY_MIN_KEYS
    splits, min_tiles = split_keys(units // queries * tiles, at_once, max(1, min_keys // tuning.tile))
    if query_start is not None and units <= MIXED_ROWS:
        splits = max(splits, MIXED_SPLITS)
    prefix_splits = 0
    if prefix_len is not None:
        assert query_start is None
        width = 16 if q.dtype is torch.float32 else 64
        prefix_splits = max(1, min(8, MULTIPROCESSORS // triton.cdiv(units * num_heads, width)))
    parts = Parts.empty(units, num_heads, prefix_splits + splits, rank, q.device)
    shape = dict(
        splits=splits, prefix_splits=prefix_splits, factor=scale * LOG2E, H=num_heads,
        rope_token=q_rope.stride(0), rope_head=q_rope.stride(1),
        **padded(rank, q_rope.shape[2], q.dtype), **page_arguments(kv_cache, scales), **early_launch(q),
    )  # fmt: skip
    table = (block_table, block_table.stride(0))
    if prefix_len is not None:
        chosen = tuning_for(width, q.dtype, scales is not None)
        _shared_prefix_kernel[(triton.cdiv(units * num_heads, width), prefix_splits)](
            q, q_rope, kv_cache, rows, *table, prefix_len, parts.out, parts.sums, units, M=width, TILE=chosen.tile,
            num_warps=chosen.warps, num_stages=chosen.stages, **shape,
        )  # fmt: skip
    _decode_kernel[(units // queries, tiles, splits)](
        q, q_rope, kv_cache, rows, query_start if query_start is not None else rows, seq_lens, *table,
        prefix_len if prefix_len is not None else rows, parts.out, parts.sums, parts.counts,
        HB=heads, Q=queries, M=columns, TILE=tuning.tile, min_tiles=min_tiles,
        PREFIX=prefix_len is not None, DECODE_ONLY=query_start is None,
        num_warps=tuning.warps, num_stages=tuning.stages, **shape,
    )  # fmt: skip
    return parts
