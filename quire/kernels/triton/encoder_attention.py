"""Attention of whole texts over a step's own keys. A program has some consecutive tokens, of one text or several, and
one head: short texts share a program, which masks the keys of the others."""

import torch
import triton
import triton.language as tl

from quire.kernels.encoder_attention import EncoderFeatures, token_spans
from quire.kernels.rope import gather_cos_sin
from quire.kernels.rope_and_write import QKNormParams, norm_and_rope

LOG2E = tl.constexpr(1.4426950408889634)


def tiles(head_bytes: int, has_bias: bool) -> tuple[int, int]:
    """Queries and keys of a program, for which a Hopper's shared memory is large enough."""
    if head_bytes > 512:
        return (32, 32) if head_bytes <= 1024 else (16, 16)
    return (64, 32) if head_bytes == 512 and has_bias else (64, 64)


@triton.jit(do_not_specialize=["num_tokens", "longest"])
def _encoder_attention_kernel(
    q,
    k,
    v,
    out,
    spans,  # [2, N] int32: where the text of each token begins and ends
    bias,  # [heads, 2 * longest - 1] float32
    num_tokens,
    q_stride,  # from token to token
    k_stride,
    v_stride,
    out_stride,
    scale,
    longest,
    D: tl.constexpr,
    DP: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    HAS_BIAS: tl.constexpr,
    M: tl.constexpr,
    TILE: tl.constexpr,
):
    head = tl.program_id(1)
    tokens = tl.program_id(0) * M + tl.arange(0, M)
    inside = tokens < num_tokens
    dims = tl.arange(0, DP)
    in_head = dims < D
    begins = tl.load(spans + tokens, mask=inside, other=num_tokens)
    ends = tl.load(spans + num_tokens + tokens, mask=inside, other=0)
    if WINDOW:
        begins = tl.maximum(begins, tokens - WINDOW + 1)
        ends = tl.minimum(ends, tokens + WINDOW)
    at = tokens.to(tl.int64)
    queries = tl.load(
        q + at[:, None] * q_stride + head * D + dims[None, :], mask=inside[:, None] & in_head[None, :], other=0.0
    )
    acc = tl.zeros((M, DP), tl.float32)
    most = tl.full((M,), -1e30, tl.float32)
    total = tl.zeros((M,), tl.float32)
    for start in range(tl.min(begins, 0), tl.max(ends, 0), TILE):
        keys = start + tl.arange(0, TILE)
        there = keys < num_tokens
        key_at = keys.to(tl.int64)
        kv_head = head // GROUP
        kt = tl.load(
            k + key_at[None, :] * k_stride + kv_head * D + dims[:, None],
            mask=there[None, :] & in_head[:, None],
            other=0.0,
        )
        scores = tl.dot(queries, kt, input_precision="ieee") * scale
        seen = (keys[None, :] >= begins[:, None]) & (keys[None, :] < ends[:, None])
        if HAS_BIAS:
            distance = keys[None, :] - tokens[:, None]
            known = seen & (tl.abs(distance) < longest)  # a step of padding may be one longer text
            scores += tl.load(bias + head * (2 * longest - 1) + longest - 1 + distance, mask=known, other=0.0)
        scores = tl.where(seen, scores * LOG2E, -1e30)
        new_most = tl.maximum(most, tl.max(scores, 1))
        weights = tl.where(seen, tl.exp2(scores - new_most[:, None]), 0.0)
        factor = tl.exp2(most - new_most)
        total = total * factor + tl.sum(weights, 1)
        values = tl.load(
            v + key_at[:, None] * v_stride + kv_head * D + dims[None, :],
            mask=there[:, None] & in_head[None, :],
            other=0.0,
        )
        acc = acc * factor[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        most = new_most
    result = acc / tl.where(total > 0, total, 1.0)[:, None]  # tokens behind the last text have no keys
    tl.store(
        out + at[:, None] * out_stride + head * D + dims[None, :],
        result.to(out.dtype.element_ty),
        mask=inside[:, None] & in_head[None, :],
    )


def encoder_attention(
    qkv: torch.Tensor,
    query_start: torch.Tensor,
    features: EncoderFeatures,
    qk_norm: QKNormParams | None = None,
    table: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    spans: torch.Tensor | None = None,
) -> torch.Tensor:
    shape, count = features.shape, qkv.shape[0]
    cos_sin = gather_cos_sin(table, positions) if table is not None and positions is not None else None
    q, k, v = norm_and_rope(qkv.contiguous(), shape.num_heads, shape.num_kv_heads, qk_norm, cos_sin)
    out = torch.empty(count, shape.num_heads * shape.head_size, dtype=qkv.dtype, device=qkv.device)
    bias = features.bias
    padded = max(16, triton.next_power_of_2(shape.head_size))
    queries, keys = tiles(padded * qkv.itemsize, bias is not None)
    grid = (triton.cdiv(count, queries), shape.num_heads)
    _encoder_attention_kernel[grid](
        q,
        k,
        v,
        out,
        token_spans(query_start, count) if spans is None else spans,
        bias,
        count,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        out.stride(0),
        features.scale,
        0 if bias is None else (bias.shape[1] + 1) // 2,
        D=shape.head_size,
        DP=padded,
        GROUP=shape.group,
        WINDOW=features.window or 0,
        HAS_BIAS=bias is not None,
        M=queries,
        TILE=keys,
        num_warps=4,
    )
    return out
