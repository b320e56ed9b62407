"""Attention of texts that are computed whole, over a step's own keys: bidirectional, and nothing is kept."""

import itertools
from dataclasses import dataclass

import torch

from quire.kernels.dispatch import use_triton
from quire.kernels.native import encoder as native
from quire.kernels.paged_attention import AttentionShape
from quire.kernels.rope import gather_cos_sin
from quire.kernels.rope_and_write import QKNormParams, norm_and_rope


@dataclass(frozen=True, eq=False)
class EncoderFeatures:
    shape: AttentionShape
    scale: float
    window: int | None = None  # keys at a smaller distance are seen; None: all
    bias: torch.Tensor | None = None  # [heads, 2 * longest - 1] float32, added to scores: by longest - 1 + key - query


def encoder_attention_torch(
    qkv: torch.Tensor,  # [N, (H + 2 KV) * D]
    query_start: torch.Tensor,  # [n + 1] int32: where each text's tokens begin
    features: EncoderFeatures,
    qk_norm: QKNormParams | None = None,
    table: torch.Tensor | None = None,  # of rotary angles, [positions, R]; None: nothing is rotated
    positions: torch.Tensor | None = None,  # [N]
) -> torch.Tensor:  # [N, H * D]; zeros for tokens behind the last text
    heads, kv_heads = features.shape.num_heads, features.shape.num_kv_heads
    cos_sin = gather_cos_sin(table, positions) if table is not None and positions is not None else None
    q, k, v = norm_and_rope(qkv, heads, kv_heads, qk_norm, cos_sin)
    q, k, v = ((x * scale).transpose(0, 1) for x, scale in ((q, features.scale), (k, 1), (v, 1)))
    out = torch.zeros_like(q)
    ends = query_start.tolist()
    for start, end in itertools.pairwise(ends):
        if start == end:
            continue
        kept = slice(start, end)
        scores = q[:, kept].unflatten(0, (kv_heads, -1)).float() @ k[:, None, kept].transpose(-1, -2).float()
        scores = _biased(scores.flatten(0, 1), features).softmax(-1)
        weights = scores.to(v.dtype).unflatten(0, (kv_heads, -1))
        out[:, kept] = (weights @ v[:, None, kept]).flatten(0, 1)
    return out.transpose(0, 1).flatten(1)


def _biased(scores: torch.Tensor, features: EncoderFeatures) -> torch.Tensor:
    """scores [H, L, L]"""
    if features.window is None and features.bias is None:
        return scores
    at = torch.arange(scores.shape[-1], device=scores.device)
    distance = at - at[:, None]  # of key and query
    if features.bias is not None:
        scores = scores + features.bias[:, distance + features.bias.shape[1] // 2]
    if features.window is not None:
        scores = scores.masked_fill(distance.abs() >= features.window, -torch.inf)
    return scores


def encoder_attention(
    qkv: torch.Tensor,
    query_start: torch.Tensor,
    features: EncoderFeatures,
    qk_norm: QKNormParams | None = None,
    table: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    spans: torch.Tensor | None = None,  # token_spans(), if they are known
) -> torch.Tensor:
    if use_triton(qkv):
        from quire.kernels.triton import encoder_attention as kernel

        return kernel.encoder_attention(qkv, query_start, features, qk_norm, table, positions, spans)
    if native.serves_encoders(qkv) and query_start.dtype is torch.int32:
        shape = (features.shape.num_heads, features.shape.num_kv_heads, features.shape.head_size)
        scores = (features.scale, features.window, features.bias)
        return native.attention(qkv, query_start, shape, *scores, qk_norm, table, positions)
    return encoder_attention_torch(qkv, query_start, features, qk_norm, table, positions)


def token_spans(query_start: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[2, N] int32: where each token's text begins and ends; nowhere for tokens behind the last text."""
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=query_start.device)
    text = torch.bucketize(tokens, query_start[1:], right=True, out_int32=True)
    ends = torch.cat((query_start, query_start[-1:]))
    return torch.stack((ends[text.long()], ends[(text + 1).long()])).int().contiguous()
