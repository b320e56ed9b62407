"""Scales of keys and values that a checkpoint has for a KV cache in fp8, one per layer and kind."""

import logging
import math
import re
from collections.abc import Iterable

import torch

from quire.checkpoint.tensors import CheckpointTensor
from quire.kernels.kv_scales import KVScales
from quire.layers.attention import Attention
from quire.layers.cache_layer import CacheLayer

logger = logging.getLogger("quire")

# compressed-tensors and fp8: self_attn.k_scale or self_attn.attn.k_scale; ModelOpt: self_attn.k_proj.k_scale; one for
# both: kv_scale.
_NAME = re.compile(r".*\blayers\.(\d+)\.self_attn\.(?:attn\.|k_proj\.|v_proj\.|qkv_proj\.)?(k|v|kv)_scale")


def is_kv_scale(name: str) -> bool:
    return name.endswith("_scale") and _NAME.fullmatch(name) is not None


class KVScaleLoader:
    """Takes the scales out of a checkpoint's tensors and notes them in the attention layers."""

    def __init__(self, layers: Iterable[CacheLayer]) -> None:
        self._layers = {layer.layer_index: layer for layer in layers if isinstance(layer, Attention)}

    def takes(self, tensor: CheckpointTensor) -> bool:
        found = _NAME.fullmatch(tensor.name) if tensor.name.endswith("_scale") else None
        layer = self._layers.get(int(found[1])) if found else None
        if found is None or layer is None:
            return False
        value = torch.empty(tuple(tensor.shape), dtype=torch.float32)
        tensor.read_into(value)
        scale = value.item() if value.numel() == 1 else math.nan  # an error only if the cache needs it
        layer.checkpoint_scales.update(dict.fromkeys(found[2], scale))
        return True


def use_checkpoint_scales(layers: Iterable[CacheLayer]) -> None:
    """Give each layer its scales for a cache in fp8; 1 where the checkpoint has none."""
    unscaled = []
    for layer in layers:
        if not isinstance(layer, Attention):
            continue
        k, v = layer.checkpoint_scales.get("k"), layer.checkpoint_scales.get("v")
        k, v = k or v, v or k  # one for both
        if k is None or v is None:
            unscaled.append(layer.layer_index)
        elif not (0 < k < math.inf and 0 < v < math.inf):
            raise ValueError(
                f"the checkpoint's scales of the KV cache in layer {layer.layer_index} are not two positive numbers, "
                "one of all keys and one of all values; leave the cache unquantized (--kv-cache-dtype bfloat16)"
            )
        elif (k, v) != (1.0, 1.0):
            layer.set_kv_scales(KVScales(k, v))
    if unscaled:
        logger.info("the KV cache in fp8 has scale 1 in %d layers: the checkpoint has none for them", len(unscaled))
