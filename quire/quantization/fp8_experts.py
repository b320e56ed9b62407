"""fp8 experts as one weight, for the kernels of mixtures."""

from collections.abc import Iterable

import torch
from torch import nn

from quire.kernels.moe import ScaledWeight
from quire.kernels.quantize_fp8 import FP8
from quire.quantization.fp8_linear import CheckpointFp8LinearMethod


def stack_fp8_experts(layers: Iterable[nn.Module]) -> ScaledWeight | None:
    """None if not all are fp8 with equal groups of scales. The layers' own weights become views: none is kept twice."""
    listed = list(layers)
    weights = [getattr(layer, "weight", None) for layer in listed]
    groups = {getattr(layer, "scale_groups", None) for layer in listed}
    if len(groups) > 1 or not all(isinstance(w, torch.Tensor) and w.dtype is FP8 for w in weights):
        return None
    data = torch.stack([layer.weight.data for layer in listed])  # type: ignore[misc]
    scale = torch.stack([layer.weight_scale for layer in listed])  # type: ignore[misc]
    for e, layer in enumerate(listed):
        layer.weight = nn.Parameter(data[e], requires_grad=False)
        layer.weight_scale = scale[e]
    return ScaledWeight(data, scale, groups.pop())


def quantizes_rows(layer: nn.Module) -> bool:
    """Whether a layer in fp8 quantizes its inputs. Experts always do so by row: their fixed scales would differ."""
    method = layer.method
    return not isinstance(method, CheckpointFp8LinearMethod) or method.scheme.activations != "none"
