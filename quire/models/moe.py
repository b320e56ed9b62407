"""Decoders with mixture-of-experts layers."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from quire.config.values import whole_number
from quire.kernels.moe_table import BUCKETS
from quire.kernels.rms_norm import RMSNormParams
from quire.layers.fused_moe import ExpertCheckpoint, FusedMoE
from quire.layers.linear import ColumnParallelLinear
from quire.layers.linear_experts import ExpertMethods, LinearExperts
from quire.layers.packed_experts import PackedExperts
from quire.models.config_checks import MAX_EXPERTS, MAX_WIDTH
from quire.models.decoder import DecoderModel
from quire.models.decoder_config import require
from quire.models.decoder_layers import MLP, BuildContext, FeedForward
from quire.models.loading.weight_map import Rule
from quire.quantization.base import StoresFusedExperts

EXPERTS = (
    Rule("model.layers.{i}.mlp.gate.weight", "layers.{i}.mlp.router.weight"),
    Rule("model.layers.{i}.mlp.experts.{e}.gate_proj.{p}", "layers.{i}.mlp.experts.gate_up.{e}.{p}", 0),
    Rule("model.layers.{i}.mlp.experts.{e}.up_proj.{p}", "layers.{i}.mlp.experts.gate_up.{e}.{p}", 1),
    Rule("model.layers.{i}.mlp.experts.{e}.down_proj.{p}", "layers.{i}.mlp.experts.down.{e}.{p}"),
)


@dataclass(frozen=True)
class Experts:
    count: int
    top_k: int
    intermediate_size: int
    renormalize: bool = True
    scoring: Literal["softmax", "topk_softmax"] = "softmax"
    activation: Literal["silu", "swigluoai"] = "silu"
    bias: bool = False  # on the router and the experts
    checkpoint: ExpertCheckpoint = "per_expert"
    shared_size: int = 0  # intermediate size of the gated shared expert; 0: none
    module: str = "mlp"  # the checkpoint's name for the block
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # its names in an expert

    @classmethod
    def from_hf(cls, hf: dict[str, Any], intermediate_size: str = "intermediate_size", **differences: Any) -> "Experts":
        """`intermediate_size`: the config key of an expert's."""
        count = hf.get("num_experts") or hf.get("num_local_experts")
        if not count:
            raise ValueError("the model's config lacks num_experts")
        require(hf, "num_experts_per_tok", intermediate_size)
        whole_number("num_experts", count, maximum=MAX_EXPERTS)
        whole_number(intermediate_size, hf[intermediate_size], maximum=MAX_WIDTH)
        if whole_number("num_experts_per_tok", hf["num_experts_per_tok"]) > count:
            raise ValueError(
                f"num_experts_per_tok is {hf['num_experts_per_tok']}; there are {count} experts (num_experts)"
            )
        if (hf.get("hidden_act") or "silu") not in ("silu", "swish"):
            raise ValueError(f"activation {hf['hidden_act']!r} of experts is not supported; supported: silu")
        return cls(count, hf["num_experts_per_tok"], hf[intermediate_size], **differences)


class SparseMLP(nn.Module):
    """A router and its experts, in place of an MLP."""

    def __init__(self, build: BuildContext, layer: int, experts: Experts) -> None:
        super().__init__()
        hidden, options = build.config.hidden_size, build.options
        placed = (options.dtype, options.device)
        self.router = ColumnParallelLinear(hidden, experts.count, experts.bias, *placed)  # replicated on every worker
        sizes = (experts.count, experts.top_k, hidden, experts.intermediate_size)
        routing: Any = {"renormalize": experts.renormalize, "scoring": experts.scoring}
        methods = _expert_methods(build, layer, experts)
        routing["activation"] = experts.activation
        self.experts: FusedMoE | PackedExperts
        if methods is not None:
            self.experts = LinearExperts(*sizes, *placed, methods, options.tp, bias=experts.bias, **routing)
        elif experts.checkpoint == "fused" and isinstance(options.quantization, StoresFusedExperts):
            self.experts = options.quantization.fused_experts()(
                *sizes, *placed, options.tp, bias=experts.bias, **routing
            )
        else:
            self.experts = FusedMoE(
                *sizes,
                *placed,
                options.tp,
                bias=experts.bias,
                checkpoint=experts.checkpoint,
                backend=options.moe_backend,
                **routing,
            )
        self.shared: MLP | None = None
        if experts.shared_size:
            self.shared = MLP(build, layer, experts.shared_size, f"{experts.module}.shared_expert")
            self.shared_gate = ColumnParallelLinear(hidden, 1, False, *placed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        routed = self.experts(x, self.router(x))
        if self.shared is None:
            return routed
        return routed + torch.sigmoid(self.shared_gate(x)) * self.shared(x)

    def forward_fused(self, stream: torch.Tensor, norm: RMSNormParams) -> torch.Tensor:
        router = self.router
        return self.experts.forward_fused(stream, norm, router.weight, residual=stream, router_bias=router.bias)

    @property
    def max_fused_rows(self) -> int:
        return self.experts.max_fused_rows if self.shared is None else 0


def _expert_methods(build: BuildContext, layer: int, experts: Experts) -> list[ExpertMethods] | None:
    """Of each expert; None if none is quantized."""
    *gate_up, down = experts.names
    modules = [f"{experts.module}.experts.{e}" for e in range(experts.count)]
    methods = [(build.method(layer, m, tuple(gate_up)), build.method(layer, m, (down,))) for m in modules]
    if all(method is None for pair in methods for method in pair):
        return None
    if experts.checkpoint == "fused":
        raise ValueError(
            "experts that the checkpoint stores in one tensor cannot be quantized yet; leave quantization out, or use "
            "an unquantized checkpoint"
        )
    return methods


class MoEModel(DecoderModel):
    """A family also overrides `configure_experts`, and `is_sparse` if some layers have dense MLPs."""

    kernel_row_counts = BUCKETS

    @classmethod
    def configure_experts(cls, hf: dict[str, Any]) -> Experts:
        raise NotImplementedError

    def is_sparse(self, layer: int) -> bool:
        return True

    def make_mlp(self, build: BuildContext, layer: int) -> FeedForward:
        if not self.is_sparse(layer):
            return MLP(build, layer)
        return SparseMLP(build, layer, self.configure_experts(self.hf))
