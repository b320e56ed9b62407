"""The attention layer of models with a latent cache: its shape, and its part of the KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from quire.attention.base import Angles, ForwardContext
from quire.attention.indexed import IndexInputs, TorchIndexedBackend
from quire.attention.latent import LatentBackend, LatentFeatures, LatentWeights
from quire.kernels.kv_scales import KVScales
from quire.kernels.paged_attention import AttentionShape
from quire.kernels.rms_norm import RMSNormParams
from quire.layers.cache_layer import CacheLayer
from quire.messages.kv_cache import LatentSpec


@dataclass(frozen=True)
class IndexSizes:
    """Of sparse attention: an index of keys of its own selects the tokens that a query attends to."""

    num_heads: int
    size: int  # of a head, and of the key that all have
    top_k: int
    interleaved: bool = False  # its rotated pairs are neighbours, not halves, whatever the layer's own are


@dataclass(frozen=True)
class LatentSizes:
    """Of a layer, all ranks together. A query has a part that is compared with keys made of the latent, and a rotated
    part that is compared with what all heads share."""

    q_rank: int | None  # that queries are compressed to; None: they are not
    rank: int  # that keys and values are compressed to
    nope: int
    rope: int
    v: int
    interleaved: bool  # rotated pairs are neighbours, not halves
    index: IndexSizes | None = None

    @property
    def query(self) -> int:
        return self.nope + self.rope

    @property
    def latent(self) -> int:
        return self.rank + self.rope

    @property
    def expanded(self) -> int:
        return self.nope + self.v


class LatentAttention(CacheLayer):
    """One layer's attention over the paged latents, of this rank's heads."""

    kv_cache: torch.Tensor
    kv_b: torch.Tensor
    backend: LatentBackend
    weights: LatentWeights | None = None

    def __init__(self, layer_index: int, num_heads: int, sizes: LatentSizes, scale: float) -> None:
        super().__init__(layer_index, AttentionShape(num_heads, 1, sizes.latent))
        self.num_heads, self.sizes = num_heads, sizes
        self.features = LatentFeatures(float(scale), sizes.rank, sizes.nope, sizes.rope, sizes.v, sizes.interleaved)

    @property
    def kind(self) -> tuple[object, ...]:
        """What its kernels are compiled for."""
        return self.num_heads, self.sizes, self.features.kv_scales is not None

    def set_weights(self, kv_b: torch.Tensor) -> None:
        """kv_b [H * (nope + v), rank] as checkpoints have it, head by head, in the compute dtype."""
        by_head = kv_b.unflatten(0, (self.num_heads, self.sizes.expanded))
        parts = [part.flatten(0, 1) for part in by_head.split((self.sizes.nope, self.sizes.v), dim=1)]
        self.register_buffer("kv_b", torch.cat(parts), persistent=False)
        w_uk, w_uv = self.kv_b.split([len(part) for part in parts])
        heads = (self.num_heads, -1)
        self.weights = LatentWeights(self.kv_b, w_uk.unflatten(0, heads), w_uv.unflatten(0, heads))

    def bind(self, views: Sequence[torch.Tensor], group: int, backend: LatentBackend) -> None:
        super().bind(views, group, backend)
        self.kv_cache, *by_token = views
        if by_token:
            self.features = replace(self.features, kv_scales=KVScales(by_token=by_token[0]))

    def prepare_weights(self, backend: LatentBackend) -> None:
        assert self.weights is not None
        self.weights = backend.prepare(self.weights)

    def kv_cache_spec(self, block_size: int, dtype: torch.dtype) -> LatentSpec:
        return LatentSpec(block_size, self.sizes.rank, self.sizes.rope, str(dtype).removeprefix("torch."))

    def _heads(self, q: torch.Tensor) -> torch.Tensor:
        return q.view(len(q), self.num_heads, self.sizes.query)

    def forward(
        self, q: torch.Tensor, kv: torch.Tensor, norm: RMSNormParams, angles: Angles, ctx: ForwardContext
    ) -> torch.Tensor:
        """q [N, heads * (nope + rope)], kv [N, rank + rope] as projected -> [N, heads * v]."""
        return self.attend(self.write(q, kv, norm, angles, ctx), ctx)

    def write(
        self, q: torch.Tensor, kv: torch.Tensor, norm: RMSNormParams, angles: Angles, ctx: ForwardContext
    ) -> torch.Tensor:
        """Latents to the cache; the queries by head."""
        if ctx.layer_hooks is not None:
            ctx.layer_hooks.wait_for_layer_load(self.layer_index)
        slots, metadata, q = ctx.slot_mapping[self.group], ctx.metadata[self.group], self._heads(q)
        self.backend.write(q, kv, norm, angles, self.kv_cache, slots, metadata, self.features)
        return q

    def attend(self, q: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """q as `write` gives it, of all tokens of a step, or of those that `ctx` is for -> [N, heads * v]."""
        assert self.weights is not None
        out = self.backend.attend(q, self.weights, self.kv_cache, ctx.metadata[self.group], self.features)
        if ctx.layer_hooks is not None:
            ctx.layer_hooks.save_kv_layer(self.layer_index, self.kv_cache)
        return out.view(out.shape[0], -1)


class IndexedLatentAttention(LatentAttention):
    """Attention over the tokens that an index selects."""

    backend: TorchIndexedBackend

    def bind(self, views: Sequence[torch.Tensor], group: int, backend: LatentBackend) -> None:
        self.index_cache = views[1]
        super().bind(views[:1], group, backend)

    def kv_cache_spec(self, block_size: int, dtype: torch.dtype) -> LatentSpec:
        assert self.sizes.index is not None
        return replace(super().kv_cache_spec(block_size, dtype), index_size=self.sizes.index.size)

    def forward(  # type: ignore[override]
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        norm: RMSNormParams,
        angles: Angles,
        ctx: ForwardContext,
        index: IndexInputs,
    ) -> torch.Tensor:
        if ctx.layer_hooks is not None:
            ctx.layer_hooks.wait_for_layer_load(self.layer_index)
        assert self.weights is not None and self.sizes.index is not None
        slots, metadata, q = ctx.slot_mapping[self.group], ctx.metadata[self.group], self._heads(q)
        self.backend.write(q, kv, norm, angles, self.kv_cache, slots, metadata, self.features)
        self.backend.write_index(index, angles, self.index_cache, slots, self.sizes.rope, self.sizes.index.interleaved)
        caches = (self.kv_cache, self.index_cache)
        out = self.backend.attend_selected(
            q, self.weights, caches, metadata, self.features, index, self.sizes.index.top_k
        )
        if ctx.layer_hooks is not None:
            ctx.layer_hooks.save_kv_layer(self.layer_index, self.kv_cache)
        return out.view(out.shape[0], -1)
