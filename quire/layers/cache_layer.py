"""A layer with a part in the KV cache: what the runner asks of it and hands to it."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from quire.kernels.paged_attention import AttentionShape
from quire.messages.kv_cache import KVCacheSpec


class CacheLayer(nn.Module):
    """Layers of one model may differ in kind of cache, heads and head size. The runner binds views of the pages, group
    and backend before the first step."""

    causal = True
    # Not of the checkpoint: set when the layer is bound.
    bound_fields: ClassVar = ("views", "group", "backend", "features", "kv_cache", "index_cache", "kv_scales")

    def __init__(self, layer_index: int, shape: AttentionShape) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.shape = shape
        self.group = 0

    def kv_cache_spec(self, block_size: int, dtype: torch.dtype) -> KVCacheSpec:
        """`block_size` and `dtype` are the engine's; a kind whose pages are not of tokens may have its own."""
        raise NotImplementedError

    def bind(self, views: Sequence[torch.Tensor], group: int, backend: Any) -> None:
        """views: [blocks, *shape] for each part of the kind's pages. backend: what the group's kind is served by."""
        self.views = tuple(views)
        self.group = group
        self.backend = backend
        self.prepare_weights(backend)

    def prepare_weights(self, backend: Any) -> None:
        """Bring what the layer holds of the checkpoint into the backend's form."""
