"""Attention of whole prompts, or their first chunks, over the step's own keys: nothing of them is in the cache yet, and
contiguous keys come by the tensor memory accelerator, which paged ones cannot."""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.dispatch import early_launch
from quire.kernels.paged_attention import AttentionFeatures

LOG2E = tl.constexpr(1.4426950408889634)
HEAD_SIZES = (64, 128)  # that registers and a box of the accelerator have room for


@triton.jit
def _fresh_prefill_kernel(
    q,  # [N, H, D]
    qkv,  # descriptor of [N, (H + 2 * KV) * D], in boxes of [TILE, D]
    out,  # [N, H, D]
    query_blocks,  # [blocks of queries, 2]: row of the batch (-1: nothing to do), first query in it
    query_start,
    scale,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    QUERIES: tl.constexpr,  # of a block: as many as query_blocks was planned with
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    G: tl.constexpr = H // KV
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

    # The queries of a KV head's group are adjacent, so that a tile of keys serves them all.
    m = tl.arange(0, BLOCK_M)
    query = first + m // G
    real = (m < QUERIES * G) & (query < num_queries)
    at = ((first_token + query).to(tl.int64) * H + kv_head * G + m % G)[:, None] * D + tl.arange(0, D)[None, :]
    vectors = tl.load(q + at, mask=real[:, None], other=0.0)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    k_column, v_column = (H + kv_head) * D, (H + KV + kv_head) * D
    # Whole tiles that even the first query sees need no mask.
    whole = (first + 1) // TILE * TILE
    acc, most, total = _attend(
        qkv, vectors, acc, most, total, first_token, k_column, v_column, 0, whole, query, scale, TILE, False
    )
    end = tl.minimum(first + QUERIES, num_queries)
    acc, most, total = _attend(
        qkv, vectors, acc, most, total, first_token, k_column, v_column, whole, end, query, scale, TILE, True
    )
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=real[:, None])


@triton.jit
def _attend(
    qkv, q, acc, most, total, first_token, k_column, v_column, begin, end, query, scale,
    TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    factor = scale * LOG2E
    for tile in range(begin, end, TILE):
        k = qkv.load([first_token + tile, k_column])
        scores = tl.dot(q, k.T)
        if MASKED:
            # Of the keys behind a row's last one, which are the next row's, none is seen.
            keys = tile + tl.arange(0, TILE)
            scores = tl.where(keys[None, :] <= query[:, None], scores, float("-inf"))
        new_most = tl.maximum(most, tl.max(scores, 1) * factor)
        weights = tl.math.exp2(scores * factor - new_most[:, None])
        shrink = tl.math.exp2(most - new_most)
        total = total * shrink + tl.sum(weights, 1)
        v = qkv.load([first_token + tile, v_column])
        acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None])
        most = new_most
    return acc, most, total


def serves(qkv: torch.Tensor, head_size: int, features: AttentionFeatures) -> bool:
    plain = features.window is None and features.softcap is None and features.slopes is None and features.sinks is None
    fits = head_size in HEAD_SIZES and qkv.itemsize == 2 and qkv.is_contiguous() and features.causal
    return plain and fits and _has_descriptors(qkv.device)


@functools.cache
def _has_descriptors(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9


def fresh_prefill(
    q: torch.Tensor,
    qkv: torch.Tensor,
    out: torch.Tensor,
    query_blocks: torch.Tensor,
    query_start: torch.Tensor,
    features: AttentionFeatures,
    num_kv_heads: int,
    queries: int,
    block: int = 128,
    tile: int = 64,
    warps: int = 8,
    stages: int = 3,
    registers: int | None = 128,
) -> None:
    """Fills `out` for the queries in `query_blocks`, in blocks of `queries`, all of rows without cached keys. Keys in
    `qkv` are as the cache has them, after norm and rotary embedding."""
    _, num_heads, head_size = q.shape
    assert queries * (num_heads // num_kv_heads) <= block
    keys = TensorDescriptor.from_tensor(qkv, [tile, head_size])
    options = {"num_warps": warps, "num_stages": stages} | ({"maxnreg": registers} if registers else {})
    _fresh_prefill_kernel[(num_kv_heads * len(query_blocks),)](
        q, keys, out, query_blocks, query_start, float(features.scale),
        H=num_heads, KV=num_kv_heads, D=head_size, BLOCK_M=block, QUERIES=queries, TILE=tile,
        **options, **early_launch(q),
    )  # fmt: skip
