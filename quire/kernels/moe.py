"""Mixture of experts: the routing of rows to experts, and the weighted sum of the experts' outputs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from quire.kernels.dispatch import early_launch, supports_triton, use_triton
from quire.kernels.int_linear import PackedIntWeight, dequantize
from quire.kernels.int_table import choose_experts, choose_few_experts, grouped_candidates
from quire.kernels.moe_routing import Routes, Routing, route_torch
from quire.kernels.moe_table import MAX_FUSED_ROWS, FewConfig, GroupedConfig, MoeConfig, Shape, choose, choose_few
from quire.kernels.rms_norm import RMSNormParams, rms_norm_torch
from quire.kernels.round_fp4 import round_mxfp4, round_nvfp4_by_expert
from quire.kernels.scaled_linear import dequantize_fp8
from quire.kernels.skinny_linear import Groups

Activation = Literal["silu", "swigluoai"]


@dataclass(frozen=True)
class ExpertWeights:
    gate_up: torch.Tensor  # [E, 2 * I, H], gate before up
    down: torch.Tensor  # [E, H, I]
    gate_up_bias: torch.Tensor | None = None  # [E, 2 * I]
    down_bias: torch.Tensor | None = None  # [E, H]
    activation: Activation = "silu"

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Experts, hidden size, intermediate size."""
        num_experts, hidden, width = self.down.shape
        return num_experts, hidden, width

    def shape(self, slots: int) -> Shape:
        num_experts, hidden, width = self.sizes
        return num_experts, slots, hidden, width


@dataclass(frozen=True)
class InputRounding:
    """Of experts whose inputs are rounded to 4-bit floats (W4A4), for both products."""

    gate_up: torch.Tensor | None = None  # [E] float32, NVFP4's global scales; None: MXFP4
    down: torch.Tensor | None = None

    def rounded(self, x: torch.Tensor, experts: torch.Tensor) -> tuple[torch.Tensor, int]:
        """x [N, H] for experts [N, k]: rounded rows, of which one serves that many pairs of row and expert."""
        top_k = experts.shape[1]
        if self.gate_up is None:
            return round_mxfp4(x), top_k
        return round_nvfp4_by_expert(x, self.gate_up, experts.flatten(), top_k), 1

    def rounded_inner(self, inner: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """inner [M, I] for experts [M]."""
        return round_mxfp4(inner) if self.down is None else round_nvfp4_by_expert(inner, self.down, experts)


@dataclass(frozen=True)
class IntExpertWeights:
    """Experts in 4 or 8 bits; the intermediate size is a multiple of 16."""

    gate_up: PackedIntWeight  # [E, 2 * I, H], gate before up
    down: PackedIntWeight  # [E, H, I]
    gate_up_bias: torch.Tensor | None = None  # [E, 2 * I]
    down_bias: torch.Tensor | None = None  # [E, H]
    activation: Activation = "silu"
    rounding: InputRounding | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        return len(self.down.words), self.down.outputs, self.down.inputs

    def shape(self, slots: int) -> Shape:
        num_experts, hidden, width = self.sizes
        return num_experts, slots, hidden, width

    def dequantized(self) -> ExpertWeights:
        gate_up, down = dequantize(self.gate_up), dequantize(self.down)
        return ExpertWeights(gate_up, down, self.gate_up_bias, self.down_bias, self.activation)


@dataclass(frozen=True)
class ScaledWeight:
    """fp8 weights of all experts, with a scale per output or per group of outputs and inputs."""

    data: torch.Tensor  # [E, N, K]
    scale: torch.Tensor  # [E, N]; with groups [E, N / groups[0], K / groups[1]]
    groups: Groups | None = None


@dataclass(frozen=True)
class Fp8ExpertWeights:
    """Experts in fp8. Few rows are multiplied as they are; `quantizes`: those of many are quantized first."""

    gate_up: ScaledWeight  # [E, 2 * I, H], gate before up
    down: ScaledWeight  # [E, H, I]
    quantizes: bool = True
    activation: Activation = "silu"
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        num_experts, hidden, width = self.down.data.shape
        return num_experts, hidden, width

    def shape(self, slots: int) -> Shape:
        num_experts, hidden, width = self.sizes
        return num_experts, slots, hidden, width

    def dequantized(self, dtype: torch.dtype = torch.bfloat16) -> ExpertWeights:
        gate_up, down = (dequantize_fp8(w.data, w.scale, w.groups, dtype) for w in (self.gate_up, self.down))
        return ExpertWeights(gate_up, down, None, None, self.activation)


AnyExpertWeights = ExpertWeights | IntExpertWeights | Fp8ExpertWeights


def activate_torch(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """[N, 2 * I], gate before up -> [N, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "swigluoai":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    return F.silu(gate) * up


def experts_torch(
    x: torch.Tensor,  # [N, H]
    weights: torch.Tensor,  # [N, k]
    experts: torch.Tensor,  # [N, k]
    w: ExpertWeights,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    return sum_experts(x, weights, experts, len(w.down), lambda x, e, _: _expert_torch(x, w, e), residual)


def sum_experts(
    x: torch.Tensor,  # [N, H]
    weights: torch.Tensor,  # [N, k]
    experts: torch.Tensor,  # [N, k]
    count: int,
    expert: Callable[[torch.Tensor, int, torch.Tensor | None], torch.Tensor],
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each expert multiplies all its rows at once; sums are in float32 and in the order of experts. `expert` gets rows
    [n, H], its index and which rows they are (None: all), and returns [n, H] in float32."""
    if residual is None:
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    else:
        total = residual.to(torch.float32, copy=True)
    if x.is_cuda:
        # Every row by every expert: a graph may be being captured, so the host cannot read which rows an expert has.
        share = torch.zeros(len(x), count, device=x.device).scatter_(1, experts.long(), weights)
        for e in range(count):
            mine = share[:, e : e + 1]
            total += torch.where(mine != 0, expert(x, e, None) * mine, 0.0)  # of other rows it may overflow
        return total.to(x.dtype)
    flat = experts.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=count).tolist()
    for e, pairs in enumerate(order.split(counts)):
        if len(pairs):
            rows = pairs // experts.shape[1]
            output = expert(x[rows], e, rows)
            total.index_add_(0, rows, output * weights.reshape(-1)[pairs, None])
    return total.to(x.dtype)


def _expert_torch(x: torch.Tensor, w: ExpertWeights, e: int) -> torch.Tensor:
    inner = F.linear(x, w.gate_up[e], None if w.gate_up_bias is None else w.gate_up_bias[e])
    inner = activate_torch(inner.float(), w.activation).to(x.dtype)
    return F.linear(inner, w.down[e], None if w.down_bias is None else w.down_bias[e]).float()


def route(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None) -> Routes:
    """See `Routing`; the bias is of the choice."""
    if not use_triton(logits):
        return route_torch(logits, routing, bias)
    from quire.kernels.triton import moe_route as kernel

    weights, experts, _ = kernel.route(logits, routing, bias)
    return weights, experts


def moe_triton(
    x: torch.Tensor,  # [N, H]
    logits: torch.Tensor,  # [N, E]
    w: AnyExpertWeights,
    routing: Routing,
    correction_bias: torch.Tensor | None = None,  # [E] float32, of the choice
    *,
    residual: torch.Tensor | None = None,  # added to the result; contiguous
    config: MoeConfig | None = None,  # default: by the table
    pdl: bool | None = None,  # start kernels while the one before still runs; default: where the device can
) -> torch.Tensor:
    """The same bits for the same input every time; may be captured in a CUDA graph after `prepare_moe`."""
    from quire.kernels.triton import moe_grouped, moe_route

    if len(x) == 0:
        return torch.empty_like(x)
    x, logits = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, logits))
    if config is None and isinstance(w, IntExpertWeights):
        config = choose_experts(w.gate_up.bits, len(x), w.shape(routing.slots))
        if config is None and w.rounding is not None:
            config = grouped_candidates(len(x), w.shape(routing.slots))[
                0
            ]  # the kernels of dequantized ones do not round
        w = w if config is not None else w.dequantized()
    config = config or choose(len(x), w.shape(routing.slots), x.element_size())
    pdl = early_launch(x)["PDL"] if pdl is None else pdl
    counted = isinstance(config, GroupedConfig)
    weights, experts, places = moe_route.route(logits, routing, correction_bias, count=counted)
    if isinstance(config, FewConfig):
        return _few_experts(x, weights, experts, w, config, None, residual, pdl)
    assert places is not None
    return moe_grouped.grouped_experts(x, weights, experts, places, w, config, residual, pdl)


def _few_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    w: AnyExpertWeights,
    config: FewConfig,
    norm: RMSNormParams | None,
    residual: torch.Tensor | None,
    pdl: bool,
) -> torch.Tensor:
    from quire.kernels.triton import int_experts, moe_few

    if isinstance(w, IntExpertWeights):
        assert norm is None
        return int_experts.few_experts(x, weights, experts, w, config, residual, pdl)
    return moe_few.few_experts(x, weights, experts, w, config, norm, residual, pdl)


def fused_layer_torch(
    x: torch.Tensor,
    norm: RMSNormParams | None,
    router: torch.Tensor,
    router_bias: torch.Tensor | None,
    w: AnyExpertWeights,
    routing: Routing,
    correction_bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The reference, in float32: see `fused_layer`."""
    wide = x.float() if norm is None else rms_norm_torch(x.float(), norm[0].float(), norm[1])
    logits = F.linear(wide, router.float(), None if router_bias is None else router_bias.float())
    routes = route_torch(logits, routing, correction_bias)
    if isinstance(w, Fp8ExpertWeights):
        w = w.dequantized(torch.float32)
    elif isinstance(w, IntExpertWeights):
        w = w.dequantized()
    gate_up_bias, down_bias = (None if bias is None else bias.float() for bias in (w.gate_up_bias, w.down_bias))
    in_float = ExpertWeights(w.gate_up.float(), w.down.float(), gate_up_bias, down_bias, w.activation)
    return experts_torch(wide, *routes, in_float, residual).to(x.dtype)


def fused_layer(
    x: torch.Tensor,  # [N, H], N <= MAX_FUSED_ROWS
    norm: RMSNormParams | None,  # RMSNorm of x first
    router: torch.Tensor,  # [E, H]
    router_bias: torch.Tensor | None,  # [E]
    w: AnyExpertWeights,
    routing: Routing,
    correction_bias: torch.Tensor | None = None,  # [E] float32, of the choice
    *,
    residual: torch.Tensor | None = None,  # added to the result; contiguous
    config: FewConfig | None = None,
    pdl: bool | None = None,
) -> torch.Tensor:
    """Norm, router, experts and residual of few rows, in three kernels."""
    if not use_triton(x):
        return fused_layer_torch(x, norm, router, router_bias, w, routing, correction_bias, residual=residual)
    from quire.kernels.triton import moe_route

    assert len(x) <= MAX_FUSED_ROWS
    if config is None and isinstance(w, IntExpertWeights):
        config = choose_few_experts(w.gate_up.bits, len(x), w.shape(routing.slots))
    config = config or choose_few(len(x), w.shape(routing.slots))
    pdl = early_launch(x)["PDL"] if pdl is None else pdl
    choice = (routing, correction_bias)
    if norm is not None and isinstance(w, IntExpertWeights):
        # Their products are too short to hide a norm in each program.
        normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        routes = moe_route.router(x, router, router_bias, norm, *choice, normed)
        return _few_experts(normed, *routes, w, config, None, residual, pdl)
    routes = moe_route.router(x, router, router_bias, norm, *choice)
    return _few_experts(x, *routes, w, config, norm, residual, pdl)


def prepare_moe(device: torch.device) -> None:
    """Allocate the kernels' workspace on a device; call it before a capture."""
    if supports_triton(device):
        from quire.kernels.triton.moe_route import RouteWorkspace

        RouteWorkspace.of(device)
