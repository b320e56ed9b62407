"""Latent attention (DeepSeek's MLA): its interface, and the backend in torch.

The cache has one vector a token, [pages, page_tokens, rank + rope]: a compressed part, normed, of which each head's key
and value are linear functions, and a rotated part that all heads' keys share. Rows of few queries are absorbed: queries
are taken to the compressed space and results back from it, so that latents are read as they lie, once for all heads.
Rows of many queries expand latents to keys and values, some at a time, which costs less per query.
"""

from dataclasses import dataclass
from typing import Any

import torch

from quire.attention.base import Angles, CacheBackend, GroupFeatures, StepInputs
from quire.kernels.kv_scales import KVScales, quantize_vectors, stored
from quire.kernels.rms_norm import RMSNormParams, rms_norm_torch
from quire.kernels.rope import apply_rope
from quire.messages.kv_cache import KVCacheSpec, LatentSpec
from quire.platforms.base import Platform

# Queries of a row from which its latents are expanded: fewer make less use of it than it costs.
MIN_EXPANDED_QUERIES = 64
# Latents expanded at a time.
EXPANDED_TOKENS = 1024


@dataclass(frozen=True, eq=False)
class LatentWeights:
    """The rows of kv_b that make keys and those that make values, of this rank's heads, in the compute dtype.

    Absorbed, a query is q_nope @ w_uk in the compressed space, and a head's result is w_uv @ (sum of latents).
    Expanded, a token's keys are w_uk @ latent and its values w_uv @ latent: x @ kv_b.T is [n, rank] -> [n, H * nope +
    H * v], the keys of all heads before the values of all heads."""

    kv_b: torch.Tensor  # [H * nope + H * v, rank]; the two others are views of it
    w_uk: torch.Tensor  # [H, nope, rank]
    w_uv: torch.Tensor  # [H, v, rank]
    packed: Any = None  # what else a backend made of them (`LatentBackend.prepare`)


@dataclass(frozen=True, eq=False)
class LatentFeatures:
    scale: float  # of scores
    rank: int  # width of the compressed part
    nope: int  # of a query's part that is not rotated
    rope: int  # of the rotated part
    v: int  # of a head's value
    interleaved: (
        bool  # rotated pairs are neighbours (2i, 2i + 1), not halves (i, i + rope / 2); they stay where they are
    )
    kv_scales: KVScales | None = None  # by_token: [pages, page_tokens]; without it, `k` is that of all numbers


class LatentBackend(CacheBackend):
    """Rows of q and kv may be slices of wider ones: their last dimension is contiguous, their first need not be. Tokens
    that belong to no row get zeros, or anything finite."""

    kinds = (LatentSpec,)

    def write(
        self,
        q: torch.Tensor,  # [N, H, nope + rope]: its last `rope` elements are rotated in place
        kv: torch.Tensor,  # [N, rank + rope]: the first part is normed, the second rotated; it may be overwritten
        norm: RMSNormParams,
        angles: Angles,
        kv_cache: torch.Tensor,  # [pages, page_tokens, rank + rope]
        slot_mapping: torch.Tensor,  # [N]
        metadata: Any,
        features: LatentFeatures,
    ) -> None:
        raise NotImplementedError

    def attend(
        self, q: torch.Tensor, weights: LatentWeights, kv_cache: torch.Tensor, metadata: Any, features: LatentFeatures
    ) -> torch.Tensor:  # [N, H, v], contiguous
        """q as `write` left it; over the latents of each row, this step's own among them."""
        raise NotImplementedError

    def prepare(self, weights: LatentWeights) -> LatentWeights:
        """The weights of a layer in the form that `attend` reads, once, when the layer is bound."""
        return weights


@dataclass
class TorchLatentMetadata:
    step: StepInputs
    block_table: torch.Tensor  # [n, max_blocks]: those of the step's rows
    block_size: int
    rows: list[tuple[int, int, int]]  # first query, end of queries, keys


class TorchLatentBackend(LatentBackend):
    name = "torch_mla"

    @classmethod
    def supports(cls, platform: Platform, dtype: torch.dtype, spec: KVCacheSpec, features: GroupFeatures) -> str | None:
        assert isinstance(spec, LatentSpec)
        if spec.index_size:
            return "a cache without keys of an index"
        return None if features.causal else "causal attention"

    @classmethod
    def declines(cls, platform: Platform, dtype: torch.dtype, features: GroupFeatures) -> str | None:
        return "it is slow on a GPU (--attention-backend torch_mla requests it)" if platform.supports_triton else None

    def build(self, step: StepInputs, block_table: torch.Tensor, block_size: int) -> TorchLatentMetadata:
        lens = step.seq_lens.tolist()
        # Tokens that verify drafts may be rows of their own, which query_start does not know.
        starts = range(len(lens) + 1) if step.decode_only else step.query_start.tolist()
        rows = [(first, end, keys) for first, end, keys in zip(starts, starts[1:], lens, strict=False)]
        return TorchLatentMetadata(step, block_table[step.rows.long()], block_size, rows)

    def write(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        norm: RMSNormParams,
        angles: Angles,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        metadata: Any,
        features: LatentFeatures,
    ) -> None:
        rank, scales = features.rank, features.kv_scales
        rotated = q[..., features.nope :]
        rotated.copy_(rotate(rotated, angles, features.interleaved))
        latent = rms_norm_torch(kv[:, :rank], *norm)
        rows = torch.cat((latent, rotate(kv[:, None, rank:], angles, features.interleaved)[:, 0]), dim=-1)
        size = kv_cache.shape[1]
        place = (slot_mapping // size, slot_mapping % size)
        if scales is not None and scales.by_token is not None:
            rows, scales.by_token[place] = quantize_vectors(rows, kv_cache.dtype)
        elif scales is not None:
            rows = stored(rows.float() / scales.k, kv_cache.dtype)
        kv_cache[place] = rows.to(kv_cache.dtype)

    def attend(
        self,
        q: torch.Tensor,
        weights: LatentWeights,
        kv_cache: torch.Tensor,
        metadata: TorchLatentMetadata,
        features: LatentFeatures,
    ) -> torch.Tensor:
        out = q.new_zeros(*q.shape[:2], features.v)
        size = metadata.block_size
        for i, (first, end, length) in enumerate(metadata.rows):
            if not length or first == end:
                continue
            pages = metadata.block_table[i, : -(-length // size)].long()
            latents = read_latents(kv_cache, pages, features.kv_scales, q.dtype)[:length]
            attend = attend_absorbed if end - first < MIN_EXPANDED_QUERIES else attend_expanded
            out[first:end] = attend(q[first:end], latents, weights, features)
        return out


def rotate(x: torch.Tensor, angles: Angles, interleaved: bool) -> torch.Tensor:
    """x [N, H, rope], computed in float32."""
    cos, sin = angles.cos_sin
    if not interleaved:
        return apply_rope(x.float(), cos.float(), sin.float()).to(x.dtype)
    half = x.shape[-1] // 2
    cos, sin = cos[..., :half].float(), sin[..., half:].float()
    even, odd = x.float().unflatten(-1, (half, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)


def read_latents(
    kv_cache: torch.Tensor, pages: torch.Tensor, scales: KVScales | None, dtype: torch.dtype
) -> torch.Tensor:
    """[tokens of the pages, rank + rope]."""
    found = kv_cache[pages]
    if scales is None:
        return found.to(dtype).flatten(0, 1)
    scale = scales.k if scales.by_token is None else scales.by_token[pages][..., None]
    return (found.float() * scale).to(dtype).flatten(0, 1)


def attend_absorbed(
    q: torch.Tensor,
    latents: torch.Tensor,
    weights: LatentWeights,
    features: LatentFeatures,
    masked: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [T, H, nope + rope], the queries of the last T of `latents` [L, rank + rope] -> [T, H, v]. `masked` [T, L]:
    what a query does not see, in place of the later ones."""
    q_nope, q_rope = q.split((features.nope, features.rope), dim=-1)
    absorbed = torch.bmm(q_nope.transpose(0, 1), weights.w_uk)  # [H, T, rank]
    queries = torch.cat((absorbed, q_rope.transpose(0, 1)), dim=-1)
    scores = (queries @ latents.T).float() * features.scale
    if masked is None:
        mask_later(scores, 0, len(latents))
    else:
        scores.masked_fill_(masked, -torch.inf)
    compressed = scores.softmax(-1).to(q.dtype) @ latents[:, : features.rank]
    return torch.bmm(compressed, weights.w_uv.transpose(1, 2)).transpose(0, 1)


def attend_expanded(
    q: torch.Tensor, latents: torch.Tensor, weights: LatentWeights, features: LatentFeatures
) -> torch.Tensor:
    """The same, with keys and values of EXPANDED_TOKENS latents at a time."""
    count, heads, _ = q.shape
    nope, v = features.nope, features.v
    queries = q.transpose(0, 1)
    most = q.new_full((heads, count, 1), -torch.inf, dtype=torch.float32)
    total, sums = torch.zeros_like(most), q.new_zeros(heads, count, v, dtype=torch.float32)
    for first in range(0, len(latents), EXPANDED_TOKENS):
        part = latents[first : first + EXPANDED_TOKENS]
        keys, values = (part[:, : features.rank] @ weights.kv_b.T).split((heads * nope, heads * v), dim=-1)
        shared = part[:, None, features.rank :].expand(-1, heads, -1)
        key = torch.cat((keys.unflatten(-1, (heads, nope)), shared), dim=-1)
        scores = torch.bmm(queries, key.permute(1, 2, 0)).float() * features.scale
        mask_later(scores, first, len(latents))
        new = torch.maximum(most, scores.amax(-1, keepdim=True))
        before, weight = (most - new).exp_(), (scores - new).exp_()
        total = total * before + weight.sum(-1, keepdim=True)
        value = values.unflatten(-1, (heads, v)).transpose(0, 1)
        sums = sums * before + torch.bmm(weight.to(q.dtype), value).float()
        most = new
    return (sums / total).to(q.dtype).transpose(0, 1)


def mask_later(scores: torch.Tensor, first: int, length: int) -> None:
    """scores [H, T, keys from `first` on] of the queries of the last T of `length` tokens."""
    _, count, keys = scores.shape
    query = torch.arange(length - count, length, device=scores.device)[:, None]
    key = torch.arange(first, first + keys, device=scores.device)
    scores.masked_fill_(key > query, -torch.inf)
