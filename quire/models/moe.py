"""Decoders with mixture-of-experts layers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from quire.config.values import finite_number, whole_number
from quire.kernels.add import add
from quire.kernels.moe import Activation
from quire.kernels.moe_routing import Routing
from quire.kernels.moe_table import BUCKETS
from quire.kernels.rms_norm import RMSNormParams
from quire.layers.fused_moe import ExpertCheckpoint, FusedMoE
from quire.layers.linear import ColumnParallelLinear
from quire.layers.linear_experts import ExpertMethods, LinearExperts
from quire.layers.load_slot import LoadSlot, Slots, new_parameter
from quire.layers.packed_experts import PackedExperts
from quire.models.config_checks import MAX_EXPERTS, MAX_SCALE, MAX_WIDTH
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
CORRECTION_BIAS = Rule("model.layers.{i}.mlp.gate.e_score_correction_bias", "layers.{i}.mlp.correction_bias")


def shared_rules(module: str) -> tuple[Rule, ...]:
    """Of shared experts by their name in the checkpoint's layer."""
    place, ours = f"model.layers.{{i}}.{module}", "layers.{i}.mlp.shared"
    return (
        Rule(f"{place}.gate_proj.{{p}}", f"{ours}.up_proj.{{p}}", 0),
        Rule(f"{place}.up_proj.{{p}}", f"{ours}.up_proj.{{p}}", 1),
        Rule(f"{place}.down_proj.{{p}}", f"{ours}.down_proj.{{p}}"),
    )


SHARED_EXPERTS = shared_rules("mlp.shared_experts")


@dataclass(frozen=True)
class Experts:
    count: int
    intermediate_size: int
    routing: Routing
    activation: Activation = "silu"
    bias: bool = False  # on the router and the experts
    correction_bias: bool = False  # on the router's scores, for the choice alone
    checkpoint: ExpertCheckpoint = "per_expert"
    shared_size: int = 0  # intermediate size of the shared experts together; 0: none
    shared_gate: bool = False  # their output is multiplied by a sigmoid
    shared_module: str = "mlp.shared_experts"  # the checkpoint's name for them
    module: str = "mlp"  # and for the block
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # its names in an expert

    @classmethod
    def from_hf(
        cls,
        hf: dict[str, Any],
        intermediate_size: str = "intermediate_size",
        routing: Mapping[str, Any] = MappingProxyType({}),
        **differences: Any,
    ) -> "Experts":
        """`intermediate_size`: the config key of an expert's; `routing`: fields of Routing beside top_k."""
        counts = ("num_experts", "num_local_experts", "n_routed_experts")
        key = next((name for name in counts if hf.get(name)), None)
        if key is None:
            raise ValueError("the model's config lacks num_experts")
        require(hf, "num_experts_per_tok", intermediate_size)
        count = whole_number(key, hf[key], maximum=MAX_EXPERTS)
        whole_number(intermediate_size, hf[intermediate_size], maximum=MAX_WIDTH)
        if whole_number("num_experts_per_tok", hf["num_experts_per_tok"]) > count:
            raise ValueError(
                f"num_experts_per_tok is {hf['num_experts_per_tok']}; there are {count} experts (num_experts)"
            )
        if (hf.get("hidden_act") or "silu") not in ("silu", "swish"):
            raise ValueError(f"activation {hf['hidden_act']!r} of experts is not supported; supported: silu")
        found = Routing(hf["num_experts_per_tok"], **routing)
        found.check(count)
        return cls(count, hf[intermediate_size], found, **differences)

    @classmethod
    def from_deepseek(cls, hf: dict[str, Any], routing: Mapping[str, Any], **differences: Any) -> "Experts":
        """With DeepSeek's config keys for groups, scaling factor and shared experts; `routing`: the rest."""
        groups = whole_number("n_group", hf.get("n_group") or 1, maximum=MAX_EXPERTS)
        kept = whole_number("topk_group", hf.get("topk_group") or groups, maximum=MAX_EXPERTS)
        scale = finite_number("routed_scaling_factor", hf.get("routed_scaling_factor", 1.0), -MAX_SCALE, MAX_SCALE)
        shared = whole_number("n_shared_experts", hf.get("n_shared_experts") or 0, minimum=0, maximum=MAX_EXPERTS)
        limited = {"groups": groups, "top_groups": kept, "scale": scale} | dict(routing)
        size = shared * (hf.get("moe_intermediate_size") or 0)
        return cls.from_hf(hf, "moe_intermediate_size", limited, **({"shared_size": size} | differences))


# DeepSeek-V3's: sigmoids, of which a bias corrects the choice, and groups by the sum of their two best.
BIASED_SIGMOID = MappingProxyType({"scores": "sigmoid", "group_score": "top2_sum", "epsilon": 1e-20})


class Router(ColumnParallelLinear):
    """Replicated on every worker. With dummy weights its rows are orthogonal and of equal norm, so that experts are
    used evenly, as in a trained model: benchmarks read as many of them as a user's model would."""

    def dummy_slots(self) -> Slots:
        slots = self.load_slots()
        slots["weight", None] = replace(slots["weight", None], dummy="orthogonal")
        return slots


class SparseMLP(nn.Module):
    """A router and its experts, in place of an MLP."""

    def __init__(self, build: BuildContext, layer: int, experts: Experts) -> None:
        super().__init__()
        hidden, options = build.config.hidden_size, build.options
        placed = (options.dtype, options.device)
        self.router = Router(hidden, experts.count, experts.bias, *placed)
        self.correction_bias: nn.Parameter | None = None
        if experts.correction_bias:
            self.correction_bias = new_parameter(experts.count, dtype=torch.float32, device=options.device)
        methods = _expert_methods(build, layer, experts)
        shared = self._make_shared(build, layer, experts, is_quantized=methods is not None)
        among = experts.shared_size // experts.intermediate_size if experts.shared_size and shared is None else 0
        sizes = (experts.count, experts.routing.with_shared(among), hidden, experts.intermediate_size)
        kind: Any = {"activation": experts.activation, "bias": experts.bias}
        self.experts: FusedMoE | PackedExperts
        if methods is not None:
            may_join = shared is not None and not experts.shared_gate
            may_join = may_join and experts.shared_size == experts.intermediate_size and not experts.bias
            linears = (shared.up_proj, shared.down_proj) if shared is not None and may_join else None
            self.experts = LinearExperts(*sizes, *placed, methods, options.tp, shared=linears, **kind)
        elif experts.checkpoint == "fused" and isinstance(options.quantization, StoresFusedExperts):
            self.experts = options.quantization.fused_experts()(*sizes, *placed, options.tp, **kind)
        else:
            self.experts = FusedMoE(
                *sizes, *placed, options.tp, checkpoint=experts.checkpoint, backend=options.moe_backend, **kind
            )
        # After the experts: its layers are processed before these then.
        self.shared = shared
        self.shared_gate = ColumnParallelLinear(hidden, 1, False, *placed) if experts.shared_gate else None

    def _make_shared(self, build: BuildContext, layer: int, experts: Experts, is_quantized: bool) -> MLP | None:
        """None if there are none, or if they can be among the others: those have weight 1 for every row."""
        if not experts.shared_size:
            return None
        names, place = build.config.names, experts.shared_module
        own = [build.method(layer, place, names.up), build.method(layer, place, (names.down,))]
        alike = not is_quantized and not experts.bias and all(method is None for method in own)
        alike = alike and not isinstance(build.options.quantization, StoresFusedExperts)
        if alike and not experts.shared_gate and experts.shared_size % experts.intermediate_size == 0:
            return None
        return MLP(build, layer, experts.shared_size, place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        routed = self.experts(x, self.router(x), self.correction_bias)
        if self.shared is None or self.experts.has_shared:
            return routed
        shared = self.shared(x)
        return add(routed, shared if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * shared)

    def forward_fused(self, stream: torch.Tensor, norm: RMSNormParams) -> torch.Tensor:
        router = self.router
        return self.experts.forward_fused(stream, norm, router.weight, stream, router.bias, self.correction_bias)

    @property
    def max_fused_rows(self) -> int:
        return self.experts.max_fused_rows if self.shared is None or self.experts.has_shared else 0

    @property
    def fuses_terms(self) -> bool:
        return False

    def load_slots(self) -> Slots:
        slots = self.dummy_slots()
        if isinstance(self.experts, FusedMoE) and self.experts.has_shared:
            slots |= {(f"shared.{name}", shard): slot for (name, shard), slot in self.experts.shared_slots().items()}
        return slots

    def dummy_slots(self) -> Slots:
        """Shared experts among the others are filled with these."""
        if self.correction_bias is None:
            return {}
        bias = self.correction_bias.data
        return {("correction_bias", None): LoadSlot(bias, tuple(bias.shape), dummy="zeros", any_shape=True)}


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
    """A family also overrides `configure_experts`, and `is_sparse` if some layers have dense MLPs: by default the first
    ones, as many as DeepSeek's config key says."""

    kernel_row_counts = BUCKETS

    @classmethod
    def configure_experts(cls, hf: dict[str, Any]) -> Experts:
        raise NotImplementedError

    def is_sparse(self, layer: int) -> bool:
        return layer >= (self.hf.get("first_k_dense_replace") or 0)

    def make_mlp(self, build: BuildContext, layer: int) -> FeedForward:
        if not self.is_sparse(layer):
            return MLP(build, layer)
        return SparseMLP(build, layer, self.configure_experts(self.hf))
