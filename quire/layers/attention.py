import torch
from torch import nn

from quire.attention.base import Angles, AttentionBackend, ForwardContext
from quire.kernels.rope_and_write import Norms
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

    def forward(
        self, qkv: torch.Tensor, ctx: ForwardContext, angles: Angles | None = None, norms: Norms | None = None
    ) -> torch.Tensor:
        """qkv [N, (heads + 2 * kv_heads) * D] -> [N, heads * D]; queries and keys are normed, then rotated."""
        if ctx.layer_hooks is not None:
            ctx.layer_hooks.wait_for_layer_load(self.layer_index)
        slots, metadata = ctx.slot_mapping[self.group], ctx.metadata[self.group]
        q = self.backend.write(qkv, self.num_heads, norms, angles, self.kv_cache, slots, metadata)
        out = self.backend.attend(q, self.kv_cache, metadata, self.scale, self.sliding_window)
        if ctx.layer_hooks is not None:
            ctx.layer_hooks.save_kv_layer(self.layer_index, self.kv_cache)
        return out.view(out.shape[0], -1)
