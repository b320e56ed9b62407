"""A mixture of experts on a GPU at the shape of Qwen3-30B-A3B: against float32, in graphs, the same bits each time."""

import importlib

import pytest
import torch

from quire.kernels.moe import (
    ExpertWeights,
    experts_torch,
    fused_layer,
    fused_layer_torch,
    moe_triton,
    prepare_moe,
    route,
)
from quire.kernels.moe_routing import Routing, route_torch
from quire.kernels.moe_table import (
    FewConfig,
    GroupedConfig,
    choose,
    down_slabs,
    gate_up_slabs,
    tile_candidates,
)
from quire.layers.fused_moe import FusedMoE
from tests.kernels.routings import ROUTINGS, bias_of, rows_with_anything, rows_with_ties

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda", 0)
E, TOP_K, H, WIDTH = 24, 8, 2048, 768  # fewer experts than the model's 128: those only take memory
ROUTING = Routing(TOP_K)
HEIGHTS = (16, 32, 64, 128)
FEW = [FewConfig(slab, down_slabs(TOP_K, WIDTH)[0]) for slab in gate_up_slabs(H)]
FEW += [FewConfig(gate_up_slabs(H)[0], slab) for slab in down_slabs(TOP_K, WIDTH)]


def tensor(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def expert_weights(bias: bool = False, dtype: torch.dtype = torch.bfloat16, num_experts: int = E) -> ExpertWeights:
    gate_up = tensor(num_experts, 2 * WIDTH, H, scale=H**-0.5, dtype=dtype)
    down = tensor(num_experts, H, WIDTH, scale=WIDTH**-0.5, dtype=dtype)
    if not bias:
        return ExpertWeights(gate_up, down)
    biases = tensor(num_experts, 2 * WIDTH, dtype=dtype), tensor(num_experts, H, dtype=dtype)
    return ExpertWeights(gate_up, down, *biases, activation="swigluoai")


def in_float(w: ExpertWeights) -> ExpertWeights:
    parts = (w.gate_up, w.down, w.gate_up_bias, w.down_bias)
    return ExpertWeights(*(None if p is None else p.float() for p in parts), activation=w.activation)


def off(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


def grouped(block_m: int) -> list[GroupedConfig]:
    first, second = tile_candidates(block_m, True), tile_candidates(block_m, False)
    found = [GroupedConfig(block_m, config, second[0]) for config in first]
    return found + [GroupedConfig(block_m, first[0], config) for config in second]


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    prepare_moe(DEVICE)


@pytest.mark.parametrize("kind", [{}, {"renormalize": False}, {"scores": "topk_softmax"}])
@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (8, 2), (60, 4), (512, 10)])
def test_route(num_experts, top_k, kind):
    logits = tensor(300, num_experts)  # bf16: with ties
    got, wanted = (how(logits, Routing(top_k, **kind)) for how in (route, route_torch))
    assert torch.equal(got[1], wanted[1])
    torch.testing.assert_close(got[0], wanted[0], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("rows", [rows_with_ties, rows_with_anything])
@pytest.mark.parametrize("name", ROUTINGS)
def test_routings(name, rows):
    count, routing, has_bias = ROUTINGS[name]
    logits, bias = rows(count), bias_of(count, has_bias)
    wanted = route_torch(logits, routing, bias)
    got = route(logits.to(DEVICE), routing, None if bias is None else bias.to(DEVICE))
    assert torch.equal(got[1].cpu(), wanted[1])
    torch.testing.assert_close(got[0].cpu(), wanted[0], atol=1e-6, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("rows", [1, 12, 300])
def test_shared_experts_among_the_others(rows):
    routing = Routing(6, "sigmoid", epsilon=1e-20, scale=2.5, shared=2)
    x, w, bias = tensor(rows, H), expert_weights(), torch.randn(E - 2, device=DEVICE)
    router = tensor(E - 2, H, scale=H**-0.5)
    wanted = fused_layer_torch(x, None, router, None, w, routing, bias, residual=x)
    logits = x.float() @ router.float().T
    assert off(moe_triton(x, logits, w, routing, bias, residual=x), wanted) < 1e-2
    if rows <= 16:
        assert off(fused_layer(x, None, router, None, w, routing, bias, residual=x), wanted) < 1e-2


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_few_rows(rows, bias):
    x, logits, w = tensor(rows, H), tensor(rows, E), expert_weights(bias)
    wanted = experts_torch(x.float(), *route_torch(logits, ROUTING), in_float(w), x)
    for config in FEW:
        got = moe_triton(x, logits, w, ROUTING, residual=x, config=config)
        assert off(got, wanted) < 5e-3, config
        assert torch.equal(got, moe_triton(x, logits, w, ROUTING, residual=x, config=config)), config


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_a_whole_layer(rows, pdl):
    x, w = tensor(rows, H), expert_weights(num_experts=128)
    gain, router = torch.rand(H, device=DEVICE) + 0.5, tensor(128, H, scale=H**-0.5)
    wanted = fused_layer_torch(x, (gain, 1e-6), router, None, w, ROUTING, residual=x)
    for config in FEW:
        layer = ((gain, 1e-6), router, None, w, ROUTING)
        got = fused_layer(x, *layer, residual=x, config=config, pdl=pdl)
        assert off(got, wanted) < 1e-2, config


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [9, 256, 1000])
@pytest.mark.parametrize("block_m", HEIGHTS)
def test_many_rows(block_m, rows, bias):
    x, logits, w = tensor(rows, H), tensor(rows, E), expert_weights(bias)
    wanted = experts_torch(x.float(), *route_torch(logits, ROUTING), in_float(w))
    for config in grouped(block_m):
        got = moe_triton(x, logits, w, ROUTING, config=config)
        assert off(got, wanted) < 7e-3, config
        # The order of an expert's rows differs each time, but the result must not.
        for _ in range(3):
            assert torch.equal(got, moe_triton(x, logits, w, ROUTING, config=config)), config


@pytest.mark.parametrize("block_m", HEIGHTS)
def test_distributions(block_m):
    w = expert_weights()
    for kind in ("all to the same", "one each"):
        logits = tensor(300, E)
        if kind == "all to the same":
            logits[:, :TOP_K] = 20.0
        else:
            logits = torch.full((3, E), -20.0, device=DEVICE)
            for row in range(3):
                logits[row, row * TOP_K : (row + 1) * TOP_K] = torch.arange(TOP_K, device=DEVICE).float()
        x = tensor(len(logits), H)
        wanted = experts_torch(x.float(), *route_torch(logits, ROUTING), in_float(w))
        assert off(moe_triton(x, logits, w, ROUTING, config=grouped(block_m)[0]), wanted) < 7e-3


def test_padding_rows_change_no_other_row():
    """Padding rows may hold anything; the others' results do not depend on them."""
    w = expert_weights()
    for rows in (4, 300):
        x, logits = tensor(rows, H), tensor(rows, E)
        config = choose(rows, w.shape(TOP_K))
        wanted = moe_triton(x, logits, w, ROUTING, config=config)
        logits[rows // 2 :] = float("nan")
        x[rows // 2 :] = float("inf")
        got = moe_triton(x, logits, w, ROUTING, config=config)
        assert torch.equal(got[: rows // 2], wanted[: rows // 2])


@pytest.mark.parametrize("rows", [1, 12, 256])
def test_a_chain_in_a_graph(rows):
    """Layers feed each other and share counters, and inputs change between replays: a missed wait would show."""
    layers = [expert_weights() for _ in range(4)]
    routers = [tensor(E, H, scale=H**-0.5) for _ in layers]
    x = tensor(rows, H)

    def chain() -> torch.Tensor:
        stream = x
        for w, router in zip(layers, routers, strict=True):
            if rows == 1:
                stream = fused_layer(stream, None, router, None, w, ROUTING, residual=stream)
            else:
                stream = moe_triton(stream, stream @ router.T, w, ROUTING, residual=stream)
        return stream

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for _ in range(10):
        x.copy_(tensor(rows, H))
        wanted = chain().clone()
        for _ in range(3):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, wanted)


@pytest.mark.parametrize("rows", [1, 40])
def test_float32_is_exact(rows):
    x, logits, w = tensor(rows, H).float(), tensor(rows, E).float(), expert_weights(dtype=torch.float32)
    exact = ExpertWeights(w.gate_up.double(), w.down.double())
    wanted = experts_torch(x.double(), *route_torch(logits, ROUTING), exact)
    assert off(moe_triton(x, logits, w, ROUTING), wanted) < 2e-6


@pytest.mark.parametrize("rows", [1, 30, 3000])
def test_the_layer(rows):
    layer = FusedMoE(E, ROUTING, H, WIDTH, torch.bfloat16, DEVICE)
    plain = FusedMoE(E, ROUTING, H, WIDTH, torch.bfloat16, DEVICE, backend="torch")
    assert layer.backend.name == "triton" and layer.max_fused_rows >= 4
    for (_, slot), (_, other) in zip(layer.dummy_slots().items(), plain.dummy_slots().items(), strict=True):
        other.view.copy_(slot.view.normal_(0.0, 0.03))
    layer.process_after_loading()
    x, logits = tensor(rows, H), tensor(rows, E)
    assert off(layer(x, logits), plain(x, logits)) < 1e-2


def test_kernels_can_be_compiled_ahead():
    from quire.kernels.triton.precompile import collecting

    x, w = tensor(300, H), expert_weights()
    with collecting() as jobs:
        for rows in (2, 300):
            moe_triton(x[:rows], tensor(rows, E), w, ROUTING, config=None)
    for module, kernel, description in jobs:
        assert getattr(importlib.import_module(module), kernel).preload(description) is not None, kernel
