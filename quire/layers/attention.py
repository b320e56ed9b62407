"""The attention layer of every model: its shape, and its part of the KV cache."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import nn

from quire.attention.base import Angles, AttentionBackend, ForwardContext
from quire.kernels.kv_scales import KVScales
from quire.kernels.paged_attention import AttentionFeatures, AttentionShape
from quire.kernels.rope_and_write import QKNormParams
from quire.layers.cache_layer import CacheLayer
from quire.messages.kv_cache import FullAttentionSpec, SlidingWindowSpec


class Attention(CacheLayer):
    """One layer's attention over the paged cache.

    `softcap`, `slopes`, `sinks` and `causal` are those of AttentionFeatures; the module that owns `sinks` loads it.
    """

    kv_cache: torch.Tensor
    backend: AttentionBackend
    slopes: torch.Tensor | None
    kv_scales: KVScales | None = None  # of what is in the cache

    def __init__(
        self,
        layer_index: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        scale: float,
        sliding_window: int | None = None,
        *,
        softcap: float | None = None,
        slopes: torch.Tensor | None = None,
        sinks: nn.Parameter | None = None,
        causal: bool = True,
    ) -> None:
        super().__init__(layer_index, AttentionShape(num_heads, num_kv_heads, head_size))
        if min(num_heads, num_kv_heads, head_size) < 1 or num_heads % num_kv_heads:
            raise ValueError(
                f"attention has {num_heads} heads of {head_size} over {num_kv_heads} KV heads, which must divide them"
            )
        for each in (slopes, sinks):
            if each is not None and (each.dtype, each.shape) != (torch.float32, (num_heads,)):
                raise ValueError(f"slopes and sinks are float32 [{num_heads}], not {each.dtype} {list(each.shape)}")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.scale = scale
        self.sliding_window = sliding_window
        self.softcap = softcap
        self.register_buffer("slopes", slopes, persistent=False)
        self.sinks = sinks
        self.causal = causal
        self.checkpoint_scales: dict[str, float] = {}  # "k" and "v", for a cache in fp8

    @property
    def kind(self) -> tuple[int | bool | None, ...]:
        """What its kernels are compiled for: layers of one kind differ only in values."""
        optional = (self.softcap, self.slopes, self.sinks, self.kv_scales)
        features = (*(each is not None for each in optional), self.causal)
        return self.sliding_window, *features, self.head_size, self.num_heads, self.num_kv_heads

    @cached_property
    def features(self) -> AttentionFeatures:
        # Holds the parameter itself, so that it sees whatever is loaded into it.
        softcap = float(self.softcap) if self.softcap is not None else None
        return AttentionFeatures(
            float(self.scale), self.sliding_window, softcap, self.slopes, self.sinks, self.causal, self.kv_scales
        )

    def bind(self, views: Sequence[torch.Tensor], group: int, backend: AttentionBackend) -> None:
        super().bind(views, group, backend)
        self.kv_cache, *by_token = views
        if by_token:
            self.set_kv_scales(KVScales(by_token=by_token[0]))

    def set_kv_scales(self, scales: KVScales) -> None:
        self.kv_scales = scales
        self.__dict__.pop("features", None)  # which has the scales of before

    def kv_cache_spec(self, block_size: int, dtype: torch.dtype) -> FullAttentionSpec:
        heads = (block_size, self.num_kv_heads, self.head_size, str(dtype).removeprefix("torch."))
        if self.sliding_window is None:
            return FullAttentionSpec(*heads, causal=self.causal)
        return SlidingWindowSpec(*heads, causal=self.causal, sliding_window=self.sliding_window)

    def forward(
        self, qkv: torch.Tensor, ctx: ForwardContext, angles: Angles | None = None, qk_norm: QKNormParams | None = None
    ) -> torch.Tensor:
        """qkv [N, (heads + 2 * kv_heads) * D] -> [N, heads * D]; norm, then rotary embedding, of queries and keys."""
        return self.attend(self.write(qkv, ctx, angles, qk_norm), ctx)

    def write(
        self, qkv: torch.Tensor, ctx: ForwardContext, angles: Angles | None, qk_norm: QKNormParams | None
    ) -> torch.Tensor:
        """Keys and values to the cache; the queries [N, heads, D]."""
        if ctx.layer_hooks is not None:
            ctx.layer_hooks.wait_for_layer_load(self.layer_index)
        slots, metadata = ctx.slot_mapping[self.group], ctx.metadata[self.group]
        return self.backend.write(qkv, self.num_heads, qk_norm, angles, self.kv_cache, slots, metadata, self.kv_scales)

    def attend(self, q: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """q as `write` gives it, of all tokens of a step, or of those that `ctx` is for -> [N, heads * D]."""
        out = self.backend.attend(q, self.kv_cache, ctx.metadata[self.group], self.features)
        if ctx.layer_hooks is not None:
            ctx.layer_hooks.save_kv_layer(self.layer_index, self.kv_cache)
        return out.view(out.shape[0], -1)

    def forward_heads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """q [N, heads, D], k and v [N, kv_heads, D], after norm and rotary embedding -> [N, heads * D]."""
        return self.forward(torch.cat((q, k, v), dim=1).flatten(1), ctx)
