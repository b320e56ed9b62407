"""Replaces modules of a transformers model by our kernels, where a probe finds the results equal."""

import inspect
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quire.kernels.rms_norm import rms_norm, rms_norm_torch
from quire.kernels.silu_mul import silu_mul
from quire.quantization.base import LinearMethod, Partition
from quire.quantization.unquantized import UnquantizedLinearMethod

EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
TOLERANCE = {torch.float32: 1e-5}
HALF_TOLERANCE = 0.02  # transformers rounds more often than we do
SCALES = (1.0, 1e3, 1e-3)  # of the probe's inputs: a clamp shows at extreme values only


class _WeightHolder(nn.Module):
    """A weight [out, in] and its LinearMethod. (An AdaptableLinear of lora/layers.py.)"""

    weight: nn.Parameter
    takes_adapters = False  # known once the model has run (adapters.py)
    makes_logits = False

    def __init__(self, weight: torch.Tensor, partitions: list[Partition]) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.method: LinearMethod = UnquantizedLinearMethod()
        self.in_features = weight.shape[1]
        self.out_partition_sizes = [part.size for part in partitions]
        self._partitions = partitions

    def partitions(self) -> list[Partition]:
        return self._partitions


class Linear(nn.Module):
    """nn.Linear with our kernels. x [..., in] -> [..., out]."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, partitions: list[Partition] | None = None
    ) -> None:
        """`partitions`: the model's own linears that it consists of, or the part of one that a rank has."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        whole = Partition(None, 0, self.out_features, (self.out_features, self.in_features), 0, 0)
        self.holder = _WeightHolder(weight, partitions or [whole])
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.weight_is_read = False

    @property
    def weight(self) -> torch.Tensor:
        """A weight that the model's own code reads must not be packed."""
        self.weight_is_read = True
        return self.holder.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        return self.holder.method.apply(self.holder, rows, self.bias).view(*x.shape[:-1], self.out_features)

    def process_after_loading(self) -> None:
        if not self.weight_is_read:
            self.holder.method.process_after_loading(self.holder)


class GatedMLP(nn.Module):
    def __init__(self, mlp: Any) -> None:
        super().__init__()
        parts = mlp.gate_proj, mlp.up_proj
        bias = None if mlp.gate_proj.bias is None else torch.cat([part.bias.data for part in parts])
        width, hidden = mlp.gate_proj.weight.shape
        halves = [Partition(i, i * width, width, (width, hidden), 0, 0) for i in range(2)]
        self.gate_up_proj = Linear(torch.cat([part.weight.data for part in parts]), bias, halves)
        self.down_proj = linear_of(mlp.down_proj)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = silu_mul(self.gate_up_proj(x.reshape(-1, x.shape[-1])))
        return self.down_proj(inner).view(*x.shape[:-1], -1)


class RMSNorm(nn.Module):
    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


def replace_modules(model: nn.Module) -> None:
    """In place. Weights are packed later, by `pack_weights`."""
    uses = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    shared: dict[nn.Module, nn.Module | None] = {module: None for module, count in uses.items() if count > 1}
    del uses  # drop references to replaced modules: the weights of a merged layer would be kept twice
    _replace_children(model, shared)


def _replace_children(parent: nn.Module, shared: dict[nn.Module, nn.Module | None]) -> None:
    for name, child in list(parent.named_children()):
        ours = shared.get(child) or _replacement(child)
        if ours is None:
            _replace_children(child, shared)
            continue
        if child in shared:
            shared[child] = ours
        setattr(parent, name, ours)


def pack_weights(model: nn.Module, except_for: nn.Module | None = None) -> None:
    for module in model.modules():
        if isinstance(module, Linear) and module is not except_for:
            module.process_after_loading()


def linear_of(module: Any) -> Linear:
    if type(module) is nn.Linear:
        return Linear(module.weight.data, None if module.bias is None else module.bias.data)
    return Linear(module.weight.data.T.contiguous(), module.bias.data)  # Conv1D: [in, out]


def _replacement(module: Any) -> nn.Module | None:
    if type(module) is nn.Linear or (type(module).__name__ == "Conv1D" and hasattr(module, "nf")):
        return linear_of(module)
    if _is_gated_mlp(module):
        return GatedMLP(module)
    return _norm_of(module)


@torch.inference_mode()
def _is_gated_mlp(module: Any) -> bool:
    children = dict(module.named_children())
    linears = [children.get(name) for name in ("gate_proj", "up_proj", "down_proj")]
    if any(type(each) is not nn.Linear for each in linears) or not _takes_one_argument(module):
        return False
    gate, up, down = linears
    assert gate is not None and up is not None and down is not None
    if (gate.bias is None) != (up.bias is None) or gate.weight.shape != up.weight.shape:
        return False
    samples = (_sample(gate.in_features, gate.weight) * scale for scale in SCALES)
    return all(_same(module(x), down(F.silu(gate(x)) * up(x))) for x in samples)


@torch.inference_mode()
def _norm_of(module: Any) -> RMSNorm | None:
    parameters = dict(module.named_parameters())
    eps = next((value for name in EPSILONS if isinstance(value := getattr(module, name, None), float)), None)
    weight = parameters.get("weight")
    if eps is None or weight is None or len(parameters) > 1 or weight.dim() != 1 or not _takes_one_argument(module):
        return None
    samples = [_sample(len(weight), weight) * scale for scale in SCALES]
    for gain in (weight.float(), 1 + weight.float()):
        if all(_same(module(x), rms_norm_torch(x, gain, eps)) for x in samples):
            return RMSNorm(gain, eps)
    return None


def _takes_one_argument(module: nn.Module) -> bool:
    return len(inspect.signature(module.forward).parameters) == 1


def _sample(size: int, like: torch.Tensor) -> torch.Tensor:
    # Mean not zero: LayerNorm must differ from RMSNorm.
    x = torch.randn(3, size, generator=torch.Generator().manual_seed(0)) + 0.5
    return x.to(like)


def _same(theirs: Any, ours: torch.Tensor) -> bool:
    if not isinstance(theirs, torch.Tensor) or theirs.shape != ours.shape or theirs.dtype is not ours.dtype:
        return False
    error = (theirs.float() - ours.float()).norm() / theirs.float().norm().clamp_min(1e-9)
    return float(error) <= TOLERANCE.get(ours.dtype, HALF_TOLERANCE)
