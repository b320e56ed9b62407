"""What kernels that read keys and values in one page after another, and no later key, lack for a group."""

from collections.abc import Sequence

import torch

from quire.attention.base import GroupFeatures
from quire.messages.kv_cache import FullAttentionSpec, KVCacheSpec


def needs_simple_pages(
    dtype: torch.dtype, spec: KVCacheSpec, features: GroupFeatures, quantized: Sequence[str] = ()
) -> str | None:
    """None: nothing. `quantized`: what keys and values may be in beside `dtype`."""
    assert isinstance(spec, FullAttentionSpec)
    if spec.scale_dtype is not None and not quantized:
        return "a cache without scales"
    if spec.dtype != str(dtype).removeprefix("torch.") and spec.dtype not in quantized:
        return f"a cache of {str(dtype).removeprefix('torch.')}, not {spec.dtype} (kv_cache_dtype auto)"
    if features.padded:
        return "pages without padding"
    if not features.causal:
        return "causal attention"
    return None
