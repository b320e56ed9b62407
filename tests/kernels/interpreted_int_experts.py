"""Kernels of experts in 4 and 8 bits against torch references, in Triton's interpreter: run by test_interpreter.py."""

from dataclasses import replace

import pytest
import torch

import tests.kernels.interpreter_fix  # noqa: F401
from quire.kernels.moe import (
    ExpertWeights,
    InputRounding,
    IntExpertWeights,
    experts_torch,
    fused_layer,
    fused_layer_torch,
    moe_triton,
    route_torch,
)
from quire.kernels.moe_routing import Routing
from quire.kernels.moe_table import FewConfig, GroupedConfig, SlabConfig, TileConfig
from quire.kernels.triton.moe_route import RouteWorkspace
from quire.kernels.triton.skinny_linear import SplitWorkspace
from quire.layers.linear_experts import ExpertMethods, LinearExperts
from quire.quantization.base import keep
from quire.quantization.int_triton import IntPart, packed_of
from tests.kernels.int_cases import Layout, make_weight, rounded_experts_torch

torch.set_num_threads(1)  # tensors are tiny
E, TOP_K, H, WIDTH = 6, 3, 160, 96
CONFIGS = {
    "few": FewConfig(SlabConfig(32, 0, stages=2), SlabConfig(64, 0, stages=2)),
    "grouped": GroupedConfig(16, TileConfig(32, 0, stages=2, tma=False), TileConfig(64, 0, stages=2, tma=False)),
}
LAYOUTS = {
    "4 bits": (Layout(4, H, 32), Layout(4, WIDTH, WIDTH)),
    "4 bits, zero points": (Layout(4, H, 32, zeros=True), Layout(4, WIDTH, WIDTH, zeros=True)),
    "8 bits": (Layout(8, H, 32), Layout(8, WIDTH, WIDTH)),
    "mxfp4": (Layout(4, H, 32, kind="e2m1"), Layout(4, WIDTH, 32, kind="e2m1")),
    "nvfp4": (Layout(4, H, 16, kind="e2m1", factors=True), Layout(4, WIDTH, 16, kind="e2m1", factors=True)),
    "Q4_K and Q6_K": (Layout(4, H, 32, centres=True), Layout(8, WIDTH, 16, kind="int7")),
}
CONFIGS["grouped, high tiles"] = replace(CONFIGS["grouped"], block_m=32)
ROUTING = Routing(TOP_K)


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).half()  # the interpreter multiplies matrices in float16, but not in bfloat16


def make_experts(name: str, bias: bool = False, activation: str = "silu") -> tuple[IntExpertWeights, ExpertWeights]:
    first, second = LAYOUTS[name]
    gate_up, wide_gate_up = make_weight(first, 2 * WIDTH, experts=E)
    down, wide_down = make_weight(second, H, experts=E)
    rest = ((tensor(E, 2 * WIDTH), tensor(E, H)) if bias else (None, None), activation)
    packed = IntExpertWeights(gate_up, down, *rest[0], activation=rest[1])
    return packed, ExpertWeights(wide_gate_up, wide_down, *rest[0], activation=rest[1])


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# Every layout with every kernel, by turns of one row and of several.
TURNS = [(1 if (i + j) % 2 else 7, layout, name) for i, layout in enumerate(LAYOUTS) for j, name in enumerate(CONFIGS)]


@pytest.mark.parametrize(("rows", "layout", "name"), TURNS)
def test_rows(rows, layout, name):
    packed, wide = make_experts(layout)
    x, logits, residual = tensor(rows, 2 * H)[:, :H], tensor(rows, E), tensor(rows, H)
    got = moe_triton(x, logits, packed, ROUTING, residual=residual, config=CONFIGS[name])
    wanted = experts_torch(x, *route_torch(logits, ROUTING), wide, residual)
    torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2)
    assert not RouteWorkspace.of(x.device).counts.any() and not SplitWorkspace.of(x.device).arrived.any()


@pytest.mark.parametrize("layout", ["4 bits, zero points", "mxfp4"])
@pytest.mark.parametrize("name", CONFIGS)
def test_bias_and_another_activation(name, layout):
    packed, wide = make_experts(layout, bias=True, activation="swigluoai")
    x, logits = tensor(5, H) * 6, tensor(5, E)
    got = moe_triton(x, logits, packed, ROUTING, config=CONFIGS[name])
    wanted = experts_torch(x, *route_torch(logits, ROUTING), wide)
    torch.testing.assert_close(got, wanted, atol=5e-2, rtol=2e-2)


@pytest.mark.parametrize("layout", ["4 bits", "nvfp4"])
def test_a_whole_layer(layout):
    packed, wide = make_experts(layout)
    x, gain, router = tensor(3, H), torch.rand(H) + 0.5, tensor(E, H) * 0.1
    layer = (x, (gain, 1e-6), router, None)
    got = fused_layer(*layer, packed, ROUTING, residual=x, config=CONFIGS["few"])
    wanted = fused_layer_torch(*layer, wide, ROUTING, residual=x)
    torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("layout", ["mxfp4", "nvfp4"])
def test_inputs_are_rounded(layout, name):
    packed, wide = make_experts(layout)
    scales = (torch.rand(E) + 0.5, torch.rand(E) + 0.5) if layout == "nvfp4" else (None, None)
    packed = replace(packed, rounding=InputRounding(*scales))
    x, logits = tensor(5, H), tensor(5, E)
    got = moe_triton(x, logits, packed, ROUTING, config=CONFIGS[name])
    wanted = rounded_experts_torch(x, *route_torch(logits, ROUTING), wide, packed.rounding)
    off = (got.float() - wanted.float()).norm() / wanted.float().norm()
    assert off < 0.03, "where inner products are rounded to another number"
    without = experts_torch(x, *route_torch(logits, ROUTING), wide)
    assert (got.float() - without.float()).norm() / without.float().norm() > 0.06


def test_many_rows_use_dequantized_experts(monkeypatch):
    monkeypatch.setattr("quire.kernels.int_table.MAX_ROWS_PER_EXPERT", 0)
    packed, wide = make_experts("8 bits")
    x, logits = tensor(40, H), tensor(40, E)
    wanted = experts_torch(x, *route_torch(logits, ROUTING), wide)
    torch.testing.assert_close(moe_triton(x, logits, packed, ROUTING), wanted, atol=2e-2, rtol=2e-2)


def test_packed_experts_become_one_weight(monkeypatch):
    monkeypatch.setattr("quire.layers.packed_experts.supports_triton", lambda device: True)
    packed, wide = make_experts("4 bits")
    device = torch.device("cpu")
    methods: list[ExpertMethods] = [(None, None)] * E
    layer = LinearExperts(E, ROUTING, H, WIDTH, torch.float16, device, methods)
    for e in range(E):
        keep(layer.gate_up[e], "int_parts", [IntPart(packed.gate_up.expert(e), None)])
        keep(layer.down[e], "int_parts", [IntPart(packed.down.expert(e), None)])
    layer.process_after_loading()
    assert layer.packed is not None and torch.equal(layer.packed.gate_up.words, packed.gate_up.words)
    first = packed_of(layer.gate_up[1])
    assert first is not None and first.words.data_ptr() == layer.packed.gate_up.words[1].data_ptr()
    x, logits = tensor(3, H), tensor(3, E)
    wanted = experts_torch(x, *route_torch(logits, ROUTING), wide)
    torch.testing.assert_close(layer(x, logits), wanted, atol=2e-2, rtol=2e-2)
    assert layer.max_fused_rows > 0
    router, gain = tensor(E, H) * 0.1, torch.ones(H)
    got = layer.forward_fused(x, (gain, 1e-6), router, residual=x)
    wanted = fused_layer_torch(x, (gain, 1e-6), router, None, wide, ROUTING, residual=x)
    torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2)


def test_experts_that_are_packed_differently_stay_apart(monkeypatch):
    monkeypatch.setattr("quire.layers.packed_experts.supports_triton", lambda device: True)
    layer = LinearExperts(2, Routing(1), H, WIDTH, torch.float16, torch.device("cpu"), [(None, None)] * 2)
    for e, name in enumerate(("4 bits", "8 bits")):
        packed, _ = make_experts(name)
        keep(layer.gate_up[e], "int_parts", [IntPart(packed.gate_up.expert(e), None)])
        keep(layer.down[e], "int_parts", [IntPart(packed.down.expert(e), None)])
    layer.process_after_loading()
    assert layer.packed is None and layer.max_fused_rows == 0
