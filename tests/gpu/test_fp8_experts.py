"""Experts in fp8 on a GPU at the shape of a real model: against dequantized weights, in graphs."""

import pytest
import torch

from quire.kernels.moe import (
    Fp8ExpertWeights,
    ScaledWeight,
    experts_torch,
    fused_layer,
    fused_layer_torch,
    moe_triton,
    prepare_moe,
    route_torch,
)
from quire.kernels.moe_routing import Routing
from quire.kernels.moe_table import GroupedConfig, tile_candidates
from quire.kernels.quantize_fp8 import FP8
from quire.layers.linear_experts import LinearExperts
from quire.quantization.fp8_linear import OnlineFp8LinearMethod
from tests.gpu.test_scaled_linear import off, replayed_equals, tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

E, TOP_K, H, WIDTH = 32, 8, 2048, 768
ROUTING = Routing(TOP_K)
DEVICE = torch.device("cuda", 0)


def scaled(n: int, k: int, groups: tuple[int, int] | None) -> ScaledWeight:
    data = tensor(E, n, k).to(FP8)
    size = (E, n) if groups is None else (E, n // groups[0], k // groups[1])
    return ScaledWeight(data, (torch.rand(size, device="cuda") + 0.5) * k**-0.5, groups)


def weights(groups: tuple[int, int] | None, quantizes: bool = True) -> Fp8ExpertWeights:
    return Fp8ExpertWeights(scaled(2 * WIDTH, H, groups), scaled(H, WIDTH, groups), quantizes)


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    prepare_moe(DEVICE)


@pytest.mark.parametrize("groups", [None, (128, 128)], ids=["channel", "blocks"])
@pytest.mark.parametrize("rows", [1, 3, 64, 256, 2000])
def test_by_the_table(rows, groups):
    w = weights(groups)
    x, logits, residual = tensor(rows, H), tensor(rows, E), tensor(rows, H)
    wanted = experts_torch(x, *route_torch(logits, ROUTING), w.dequantized(), residual)

    def run() -> torch.Tensor:
        return moe_triton(x, logits, w, ROUTING, residual=residual)

    assert off(run(), wanted) < 0.05
    replayed_equals(run, rows)


@pytest.mark.parametrize("quantizes", [False, True])
@pytest.mark.parametrize("groups", [None, (128, 128)], ids=["channel", "blocks"])
@pytest.mark.parametrize("block_m", [16, 64, 128])
def test_every_tile(block_m, groups, quantizes):
    w, rows = weights(groups, quantizes), 400
    x, logits = tensor(rows, H), tensor(rows, E)
    wanted = experts_torch(x, *route_torch(logits, ROUTING), w.dequantized())
    limit = 0.06 if quantizes and block_m >= 64 else 1e-2
    for first, second in zip(tile_candidates(block_m, True), tile_candidates(block_m, False), strict=False):
        config = GroupedConfig(block_m, first, second)
        assert off(moe_triton(x, logits, w, ROUTING, config=config), wanted) < limit, config


@pytest.mark.parametrize("groups", [None, (128, 128)], ids=["channel", "blocks"])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_whole_layer(rows, groups):
    w, x, gain = weights(groups), tensor(rows, H), torch.rand(H, device="cuda") + 0.5
    layer = (x, (gain, 1e-6), tensor(E, H, scale=0.1), None)
    wanted = fused_layer_torch(*layer, w, ROUTING, residual=x)
    assert off(fused_layer(*layer, w, ROUTING, residual=x), wanted) < 1e-2


def test_experts_quantized_while_loading_are_one_weight():
    methods = [(OnlineFp8LinearMethod(True), OnlineFp8LinearMethod(True))] * 8
    experts = LinearExperts(8, Routing(2), 256, 128, torch.bfloat16, DEVICE, methods)
    for layer in (*experts.gate_up, *experts.down):
        for slot in layer.load_slots().values():
            with slot.opened() as view:
                view.copy_(torch.randn(view.shape, device="cuda") * 0.05)
        layer.process_after_loading()
    x, logits = tensor(9, 256), tensor(9, 8)
    apart = experts(x, logits)
    experts.process_after_loading()
    assert isinstance(experts.packed, Fp8ExpertWeights)
    assert experts.down[3].weight.data_ptr() == experts.packed.down.data[3].data_ptr()
    assert off(experts(x, logits), apart) < 0.06  # inputs of down are rounded to fp8 after sums in another order
