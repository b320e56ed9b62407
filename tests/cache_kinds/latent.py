"""A worked example of an attention backend: a latent cache, served by torch. One file and one registration."""

from dataclasses import dataclass

import torch

from quire.attention.base import CacheBackend, StepInputs
from quire.attention.selector import register_backend
from quire.core.kv_groups import FullAttentionGroup, register_group
from quire.layers.cache_layer import CacheLayer
from quire.messages.kv_cache import LatentSpec


class OwnLatentSpec(LatentSpec):
    """A kind of its own: the engine has backends for LatentSpec."""


register_group(OwnLatentSpec, FullAttentionGroup)


@dataclass
class LatentMetadata:
    step: StepInputs
    block_table: torch.Tensor
    block_size: int


class LatentTorchBackend(CacheBackend):
    """The cache is [pages, tokens, rank + rope]."""

    name = "latent-torch"
    kinds = (OwnLatentSpec,)
    max_page_tokens = 8  # whatever the allocator's blocks are

    @classmethod
    def supports(cls, platform, dtype, spec, features):
        return "a cache without scales" if spec.scale_dtype is not None else None

    def build(self, step, block_table, block_size):
        return LatentMetadata(step, block_table, block_size)

    def write(self, latents, cache, slots):
        size = cache.shape[1]
        cache[slots // size, slots % size] = latents

    def attend(self, q, cache, rank, metadata):
        """q [N, H, rank + rope] -> [N, H, rank]."""
        out = q.new_zeros(*q.shape[:2], rank)
        step, size = metadata.step, metadata.block_size
        starts = step.query_start.tolist()
        for i, (row, length) in enumerate(zip(step.rows.tolist(), step.seq_lens.tolist(), strict=True)):
            if row < 0:
                continue
            pages = metadata.block_table[row, : -(-length // size)].long()
            latents = cache[pages].flatten(0, 1)[:length]
            queries = slice(starts[i], starts[i + 1])
            out[queries] = attend_latents(q[queries], latents, rank)
        return out


register_backend(LatentTorchBackend)


def attend_latents(q, latents, rank):
    """q [T, H, width] of the last of [L, width] tokens."""
    scores = torch.einsum("thd,ld->htl", q, latents) * q.shape[-1] ** -0.5
    last = torch.arange(len(latents) - len(q), len(latents), device=q.device)[:, None]
    later = torch.arange(len(latents), device=q.device) > last
    return torch.einsum("htl,ld->thd", scores.masked_fill(later, -torch.inf).softmax(-1), latents[:, :rank])


class LatentLayer(CacheLayer):
    def __init__(self, layer_index, shape, rank):
        super().__init__(layer_index, shape)
        self.rank = rank

    def kv_cache_spec(self, block_size, dtype):
        rope = self.shape.head_size - self.rank
        return OwnLatentSpec(block_size, self.rank, rope, str(dtype).removeprefix("torch."))

    def forward(self, q, latents, ctx):
        (cache,) = self.views
        self.backend.write(latents, cache, ctx.slot_mapping[self.group])
        return self.backend.attend(q, cache, self.rank, ctx.metadata[self.group])


class DenseLatents(torch.nn.Module):
    """The reference, for one sequence without a cache."""

    def __init__(self, layer):
        super().__init__()
        self.rank = layer.rank

    def forward(self, q, latents, ctx):
        return attend_latents(q, latents, self.rank)
