import torch
from torch import nn

from quire.attention.base import AttentionBackend, ForwardContext
from quire.messages.kv_cache import KVCacheSpec


class Attention(nn.Module):
    """One layer's attention over the paged cache. The runner binds cache, group and backend before the first step."""

    kv_cache: torch.Tensor
    backend: AttentionBackend

    def __init__(
        self,
        layer_index: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        scale: float,
        sliding_window: int | None = None,
    ) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.scale = scale
        self.sliding_window = sliding_window
        self.group = 0

    def bind(self, kv_cache: torch.Tensor, group: int, backend: AttentionBackend) -> None:
        """kv_cache: shaped as backend.kv_cache_shape says."""
        self.kv_cache = kv_cache
        self.group = group
        self.backend = backend

    def kv_cache_spec(self, block_size: int, dtype: torch.dtype) -> KVCacheSpec:
        return KVCacheSpec(block_size, self.num_kv_heads, self.head_size, dtype.itemsize, self.sliding_window)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """q [N, heads, D], k and v [N, kv_heads, D] -> [N, heads * D]."""
        if ctx.layer_hooks is not None:
            ctx.layer_hooks.wait_for_layer_load(self.layer_index)
        slots, metadata = ctx.slot_mapping[self.group], ctx.metadata[self.group]
        out = self.backend.forward(q, k, v, self.kv_cache, slots, metadata, self.scale, self.sliding_window)
        if ctx.layer_hooks is not None:
            ctx.layer_hooks.save_kv_layer(self.layer_index, self.kv_cache)
        return out.view(out.shape[0], -1)
