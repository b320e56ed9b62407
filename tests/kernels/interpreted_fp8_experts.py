"""Kernels of experts in fp8 against float32, in Triton's interpreter: run by test_interpreter.py."""

import pytest
import torch

import tests.kernels.interpreter_fix  # noqa: F401
from quire.kernels.moe import (
    Fp8ExpertWeights,
    ScaledWeight,
    experts_torch,
    fused_layer,
    fused_layer_torch,
    moe_triton,
)
from quire.kernels.moe_routing import Routing, route_torch
from quire.kernels.moe_table import FewConfig, GroupedConfig, MoeConfig, SlabConfig, TileConfig
from quire.kernels.quantize_fp8 import quantize_fp8_torch
from quire.kernels.triton import moe_grouped
from quire.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from quire.layers.linear_experts import LinearExperts
from quire.quantization.fp8_linear import OnlineFp8LinearMethod

torch.set_num_threads(1)  # tensors are tiny
E, TOP_K, H, WIDTH = 4, 2, 96, 32
ROUTING = Routing(TOP_K)
LAYOUTS = {"channel": (None, None), "blocks": ((32, 32), (16, 32))}
CONFIGS: dict[str, MoeConfig] = {
    "few, one step": FewConfig(SlabConfig(16, 128), SlabConfig(8, 64)),
    "few, loop": FewConfig(SlabConfig(16, 32), SlabConfig(16, 32)),
    "grouped": GroupedConfig(16, TileConfig(32, 16, stages=2, tma=False), TileConfig(32, 16, stages=2, tma=False)),
    "grouped, tma": GroupedConfig(16, TileConfig(16, 32), TileConfig(64, 16)),
    "rows quantized": GroupedConfig(32, TileConfig(16, 64, tma=False), TileConfig(16, 32)),
}


def tensor(*shape: int) -> torch.Tensor:
    return (torch.randn(*shape) * 0.5).half()  # the interpreter multiplies matrices in float16, but not in bfloat16


def off(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


def scaled(groups: tuple[int, int] | None, n: int, k: int) -> ScaledWeight:
    data = quantize_fp8_torch(tensor(E * n, k))[0].view(E, n, k)
    size = (E, n) if groups is None else (E, n // groups[0], k // groups[1])
    return ScaledWeight(data, (torch.rand(size) + 0.5) / 448, groups)


def weights(layout: str) -> Fp8ExpertWeights:
    first, second = LAYOUTS[layout]
    return Fp8ExpertWeights(scaled(first, 2 * WIDTH, H), scaled(second, H, WIDTH))


@pytest.fixture(autouse=True)
def seeded(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(moe_grouped, "MIN_QUANTIZED", 32)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_experts(name, layout):
    w, rows = weights(layout), 2 if "few" in name else 9
    x, logits, residual = tensor(rows, H), tensor(rows, E), tensor(rows, H)
    wanted = experts_torch(x, *route_torch(logits, ROUTING), w.dequantized(torch.float16), residual)
    got = moe_triton(x, logits, w, ROUTING, residual=residual, config=CONFIGS[name])
    # The interpreter's cast to fp8 is off where rounding carries into the exponent; tests/gpu has a closer limit.
    limit = 0.15 if name == "rows quantized" else 5e-3
    assert off(got, wanted) < limit


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_with_norm_and_router(layout):
    w, x = weights(layout), tensor(2, H)
    layer = (x, (torch.rand(H) + 0.5, 1e-6), tensor(E, H), None)
    wanted = fused_layer_torch(*layer, w, ROUTING, residual=x)
    got = fused_layer(*layer, w, ROUTING, residual=x, config=CONFIGS["few, one step"])
    assert off(got, wanted) < 5e-3


def test_a_shared_expert_joins_those_that_are_in_fp8_as_it_is(monkeypatch):
    monkeypatch.setattr(LinearExperts, "can_sort", True)
    placed = (torch.float16, torch.device("cpu"))
    method = OnlineFp8LinearMethod(True)
    for joins in (True, False):
        own = method if joins else None
        shared = (
            MergedColumnParallelLinear(H, [WIDTH, WIDTH], False, *placed, method=own),
            RowParallelLinear(WIDTH, H, False, *placed, method=own),
        )
        experts = LinearExperts(E, ROUTING, H, WIDTH, *placed, [(method, method)] * E, shared=shared)
        for layer in (*experts.gate_up, *experts.down, *shared):
            for slot in layer.load_slots().values():
                with slot.opened() as view:
                    view.copy_(torch.randn(view.shape) * 0.3)
            layer.process_after_loading()
        experts.process_after_loading()
        packed = experts.packed
        assert experts.has_shared == joins and isinstance(packed, Fp8ExpertWeights)
        if joins:
            assert shared[1].weight.data_ptr() == packed.down.data[E].data_ptr()  # a view: nothing is kept twice
        x, logits = tensor(3, H), tensor(3, E)
        routing = Routing(TOP_K, shared=int(joins))
        wanted = experts_torch(x, *route_torch(logits, routing), packed.dequantized(torch.float16))
        assert off(experts(x, logits), wanted) < 5e-3
