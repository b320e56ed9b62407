"""A mixture of experts in bf16 on a CPU."""

from dataclasses import dataclass

import torch

from quire.kernels.moe_routing import GROUP_SCORES, SCORES, Routes, Routing
from quire.kernels.native import PANEL, TYPES, has_amx, linear_kind, native_function

ACTIVATIONS = ("silu", "swigluoai")  # as moe.c numbers them
MAX_ROWS = 2048  # at once: what lies between the products is eight or so times as many rows


@dataclass(frozen=True)
class PackedExperts:
    gate_up: torch.Tensor  # [E, panels, pairs of inputs, 32, 2]
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    activation: str
    hidden_size: int
    intermediate_size: int


def pack_experts(weight: torch.Tensor) -> torch.Tensor:
    """[E, N, K] bf16 -> packed, as `pack_linear` does it, for each expert."""
    num_experts, n, k = weight.shape
    weight = weight.contiguous()
    packed = torch.empty(num_experts, -(-n // PANEL), -(-k // 2), PANEL, 2, dtype=torch.bfloat16)
    for e in range(num_experts):
        native_function("quire_pack_linear")(weight[e].data_ptr(), packed[e].data_ptr(), n, k)
    return packed


def can_serve() -> bool:
    return linear_kind() is not None


def route(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None) -> Routes:
    logits = logits.contiguous()
    rows, num_experts = logits.shape
    routing.check(num_experts)
    if bias is not None and (bias.dtype is not torch.float32 or tuple(bias.shape) != (num_experts,)):
        raise ValueError(f"the bias is {bias.dtype} of shape {tuple(bias.shape)}, not float32 of {num_experts}")
    weights = torch.empty(rows, routing.slots, dtype=torch.float32)
    experts = torch.empty(rows, routing.slots, dtype=torch.int32)
    native_function("quire_route")(
        logits.data_ptr(), bias.data_ptr() if bias is not None else None, weights.data_ptr(), experts.data_ptr(),
        rows, num_experts, routing.top_k, routing.groups, routing.top_groups, routing.shared,
        routing.epsilon, routing.scale, SCORES.index(routing.scores), GROUP_SCORES.index(routing.group_score),
        routing.of_chosen, routing.by_logits(bias is not None), TYPES[logits.dtype],
    )  # fmt: skip
    return weights, experts


def moe(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, w: PackedExperts) -> torch.Tensor:
    """x [N, H] -> [N, H]; weights and experts [N, slots], which must exist."""
    x = x.contiguous()
    out = torch.empty_like(x)
    rows, top_k = experts.shape
    num_experts, hidden, width = len(w.gate_up), w.hidden_size, w.intermediate_size
    pairs = min(rows, MAX_ROWS) * top_k
    numbers = torch.empty(num_experts + 1 + 2 * pairs, dtype=torch.int32)
    rooms = [torch.empty(pairs, size, dtype=torch.bfloat16) for size in (hidden, 2 * width, width)]
    biases = [bias.data_ptr() if bias is not None else None for bias in (w.gate_up_bias, w.down_bias)]
    for first in range(0, rows, MAX_ROWS):
        some = min(MAX_ROWS, rows - first)
        native_function("quire_moe")(
            x.data_ptr() + first * hidden * 2, w.gate_up.data_ptr(), w.down.data_ptr(), *biases,
            weights.data_ptr() + first * top_k * 4, experts.data_ptr() + first * top_k * 4,
            numbers.data_ptr(), *(room.data_ptr() for room in rooms), out.data_ptr() + first * hidden * 2,
            some, top_k, num_experts, hidden, width, ACTIVATIONS.index(w.activation), has_amx(),
        )  # fmt: skip
    return out
