"""What kernels that read keys and values in one page after another, and no later key, lack for a group."""

import torch

from quire.attention.base import GroupFeatures
from quire.messages.kv_cache import FullAttentionSpec, KVCacheSpec


def needs_simple_pages(dtype: torch.dtype, spec: KVCacheSpec, features: GroupFeatures, fp8: bool = False) -> str | None:
    """None: nothing. `fp8`: keys and values may be in fp8."""
    assert isinstance(spec, FullAttentionSpec)
    if spec.scale_dtype is not None:
        return "a cache without scales"
    if spec.dtype != str(dtype).removeprefix("torch.") and not (fp8 and spec.dtype == "float8_e4m3fn"):
        return f"a cache of {str(dtype).removeprefix('torch.')}, not {spec.dtype} (kv_cache_dtype auto)"
    if features.padded:
        return "pages without padding"
    if not features.causal:
        return "causal attention"
    return None
