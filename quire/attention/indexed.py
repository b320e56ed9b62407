"""Sparse latent attention (DeepSeek-V3.2, GLM-5), in torch: a query attends to the tokens that an index scores highest.

A token has a key for the index, in the page beside its latent. The score of a token is the sum over the index's
heads of relu(query . key), each times the query's weight for the head.
"""

from dataclasses import dataclass

import torch

from quire.attention.base import Angles, GroupFeatures
from quire.attention.latent import (
    LatentFeatures,
    LatentWeights,
    TorchLatentBackend,
    TorchLatentMetadata,
    attend_absorbed,
    read_latents,
    rotate,
)
from quire.messages.kv_cache import KVCacheSpec, LatentSpec
from quire.platforms.base import Platform

QUERY_BLOCK = 128  # queries of a row that are scored at a time


@dataclass(frozen=True, eq=False)
class IndexInputs:
    """Of a step's tokens; `write_index` rotates queries and keys in place."""

    q: torch.Tensor  # [N, index heads, size]
    k: torch.Tensor  # [N, size]
    weights: torch.Tensor  # [N, index heads] float32


class TorchIndexedBackend(TorchLatentBackend):
    name = "torch_dsa"

    @classmethod
    def supports(cls, platform: Platform, dtype: torch.dtype, spec: KVCacheSpec, features: GroupFeatures) -> str | None:
        assert isinstance(spec, LatentSpec)
        if not spec.index_size:
            return "a cache with keys of an index"
        if spec.scale_dtype is not None or spec.dtype != str(dtype).removeprefix("torch."):
            return "a cache that is not quantized (kv_cache_dtype auto)"
        return None if features.causal else "causal attention"

    @classmethod
    def declines(cls, platform: Platform, dtype: torch.dtype, features: GroupFeatures) -> str | None:
        return None

    def write_index(
        self,
        index: IndexInputs,
        angles: Angles,
        index_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        rope: int,
        interleaved: bool = False,
    ) -> None:
        """The first `rope` elements are rotated."""
        for x in (index.q, index.k[:, None]):
            x[..., :rope] = rotate(x[..., :rope], angles, interleaved)
        size = index_cache.shape[1]
        index_cache[slot_mapping // size, slot_mapping % size] = index.k

    def attend_selected(
        self,
        q: torch.Tensor,
        weights: LatentWeights,
        caches: tuple[torch.Tensor, torch.Tensor],  # latents, and keys of the index
        metadata: TorchLatentMetadata,
        features: LatentFeatures,
        index: IndexInputs,
        top_k: int,
    ) -> torch.Tensor:
        out = q.new_zeros(*q.shape[:2], features.v)
        for i, (first, end, length) in enumerate(metadata.rows):
            if not length or first == end:
                continue
            pages = metadata.block_table[i, : -(-length // metadata.block_size)].long()
            latents, keys = (read_latents(cache, pages, None, q.dtype)[:length] for cache in caches)
            for begin in range(first, end, QUERY_BLOCK):
                last = min(begin + QUERY_BLOCK, end)
                mine, visible = slice(begin, last), length - (end - last)
                scores = index_scores(index.q[mine], keys[:visible], index.weights[mine])
                masked = not_selected(scores, top_k)
                out[mine] = attend_absorbed(q[mine], latents[:visible], weights, features, masked)
        return out


def index_scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """q [T, heads, size] of the last T of `keys` [L, size], weights [T, heads] -> [T, L]; -inf for later tokens."""
    products = torch.relu(q.float() @ keys.float().T)  # [T, heads, L]
    scores = (weights[:, None] @ products)[:, 0]
    query = torch.arange(len(keys) - len(q), len(keys), device=q.device)[:, None]
    return scores.masked_fill_(torch.arange(len(keys), device=q.device) > query, -torch.inf)


def not_selected(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """[T, L] bool: all but the `top_k` greatest of each row; what is -inf never is selected.

    Of equal scores the earlier tokens are taken. Where no head of the index likes a token its score is 0 exactly, so
    ties happen, and the order in which torch.topk takes them depends on the shape of the step.
    """
    masked = scores == -torch.inf
    if scores.shape[1] <= top_k:
        return masked
    least = scores.topk(top_k, dim=1, sorted=False).values.amin(1, keepdim=True)
    above, equal = scores > least, scores == least
    room = top_k - above.sum(1, keepdim=True)
    return masked | ~(above | (equal & (equal.cumsum(1) <= room)))
