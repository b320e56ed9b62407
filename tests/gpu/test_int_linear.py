"""Kernels of 4- and 8-bit weights on a GPU at shapes of real models: against float32, in graphs, reproducible."""

import pytest
import torch
from torch import nn

from quire.kernels.int_linear import (
    dequantize,
    dequantize_torch,
    int_linear,
    int_linear_torch,
    linear,
    prepare_int_linear,
)
from quire.kernels.int_table import candidates, few_candidates, grouped_candidates
from quire.kernels.moe import (
    IntExpertWeights,
    experts_torch,
    fused_layer,
    fused_layer_torch,
    moe_triton,
    prepare_moe,
    route_torch,
)
from quire.kernels.moe_routing import Routing
from quire.quantization.int_triton import TritonIntKernel
from tests.kernels.int_cases import LAYOUTS, Layout, make_weight
from tests.quantization.test_int_triton import Decoded
from tests.quantization.test_methods import generated
from tests.tiny_models import save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MODELS = [Layout(4, 4096, 128), Layout(4, 14336, 128, zeros=True), Layout(8, 4096, 128), Layout(8, 2048, 2048)]
EXPERTS = (16, 4, 1024, 768)  # experts, chosen, hidden size, intermediate size


def tensor(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def off(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    prepare_int_linear(torch.device("cuda", 0))
    prepare_moe(torch.device("cuda", 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout(layout, dtype):
    weight, wanted = make_weight(layout, 200, dtype, "cuda")
    assert torch.equal(dequantize(weight), wanted) and torch.equal(dequantize_torch(weight), wanted)
    for rows in (1, 5, 33, 100):
        x = tensor(rows, layout.inputs, dtype=dtype)
        for config in candidates(rows, layout.inputs, 200, weight.fields * weight.plane):
            got = int_linear(x, weight, config=config)
            assert off(got, int_linear_torch(x, weight)) < 5e-3, config


@pytest.mark.parametrize("layout", MODELS, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 17, 64, 256])
def test_every_candidate(rows, layout):
    n = 4096
    weight, _ = make_weight(layout, n, torch.bfloat16, "cuda", scale_dtype=torch.float16)
    x, bias = tensor(rows, layout.inputs), tensor(n)
    wanted = int_linear_torch(x, weight, bias)
    for config in candidates(rows, layout.inputs, n, weight.fields * weight.plane):
        got = int_linear(x, weight, bias, config=config)
        assert off(got, wanted) < 5e-3, config
        assert torch.equal(got, int_linear(x, weight, bias, config=config)), config


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("layout", MODELS, ids=str)
@pytest.mark.parametrize("rows", [1, 2])
def test_fused(rows, layout, pdl):
    k, n = layout.inputs, 3072
    weight, _ = make_weight(layout, 2 * n, torch.bfloat16, "cuda")
    x, fused = tensor(rows, k), {"norm": (tensor(k).float(), 1e-6), "residual": tensor(rows, n), "silu": True}
    wanted = int_linear_torch(x, weight, **fused)
    for config in candidates(rows, k, n, weight.fields * weight.plane):
        assert off(int_linear(x, weight, config=config, pdl=pdl, **fused), wanted) < 8e-3, config


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("rows", [1, 64, 256])
def test_a_chain_in_a_graph(rows, pdl):
    """Each product feeds the next, and the workspace is used again at once: a missed wait would show."""
    k = 2048
    weights = [make_weight(Layout(4, k, 128), k, torch.bfloat16, "cuda")[0] for _ in range(8)]
    x = tensor(rows, k)
    for config in candidates(rows, k, k, 512):

        def chain(config=config) -> torch.Tensor:
            y = x
            for weight in weights:
                y = int_linear(y, weight, config=config, pdl=pdl)
            return y

        replayed_equals(chain, config)


def replayed_equals(run, what) -> None:
    wanted = run().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(20):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, wanted), what


@pytest.mark.parametrize("rows", [1, 2, 64, 256, 1000])
def test_a_layer_in_a_graph(rows):
    """By the table: few rows, tiles, and those for which the weight is dequantized first."""
    groups = 1024 // 128
    weights = [
        Decoded(
            4,
            torch.randint(16, (n, 1024), dtype=torch.uint8, device="cuda"),
            torch.rand(n, groups, device="cuda") / 100,
            torch.randint(16, (n, groups), dtype=torch.int16, device="cuda"),
            128,
        )
        for n in (512, 256)
    ]
    layer, kernel = nn.Module(), TritonIntKernel(torch.bfloat16)
    kernel.prepare(layer, weights, "a layer")
    assert kernel.can_fuse(layer)
    x, bias = tensor(rows, 1024), tensor(768)
    groups_of = torch.arange(1024, device="cuda") // 128
    wide = torch.cat([(w.codes.float() - w.zeros[:, groups_of]) * w.scales[:, groups_of] for w in weights])
    assert off(kernel.apply(layer, x, bias), x.float() @ wide.T + bias.float()) < 1e-2
    replayed_equals(lambda: kernel.apply(layer, x, bias), rows)


def make_experts(bits: int, zeros: bool = False) -> IntExpertWeights:
    num_experts, _, hidden, width = EXPERTS
    gate_up, _ = make_weight(Layout(bits, hidden, 128, zeros), 2 * width, torch.bfloat16, "cuda", num_experts)
    down, _ = make_weight(Layout(bits, width, 128, zeros), hidden, torch.bfloat16, "cuda", num_experts)
    return IntExpertWeights(gate_up, down)


@pytest.mark.parametrize(("bits", "zeros"), [(4, False), (4, True), (8, False)])
@pytest.mark.parametrize("rows", [1, 3, 64, 256, 2000])
def test_experts(rows, bits, zeros):
    num_experts, top_k, hidden, _ = EXPERTS
    w = make_experts(bits, zeros)
    x, logits, residual = tensor(rows, hidden), tensor(rows, num_experts), tensor(rows, hidden)
    wanted = experts_torch(x, *route_torch(logits, Routing(top_k)), w.dequantized(), residual)
    few = few_candidates() if rows <= 3 else []
    for config in (None, *few, *grouped_candidates(rows, EXPERTS)):

        def run(config=config) -> torch.Tensor:
            return moe_triton(x, logits, w, Routing(top_k), residual=residual, config=config)

        assert off(run(), wanted) < 1e-2, config
        if rows in (1, 64, 256):
            replayed_equals(run, config)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_whole_layer_of_experts(rows):
    num_experts, top_k, hidden, _ = EXPERTS
    w, x, gain = make_experts(4), tensor(rows, hidden), torch.rand(hidden, device="cuda") + 0.5
    layer = (x, (gain, 1e-6), tensor(num_experts, hidden, scale=0.1), None)
    wanted = fused_layer_torch(*layer, w, Routing(top_k), residual=x)
    for config in (None, *few_candidates()):
        got = fused_layer(*layer, w, Routing(top_k), residual=x, config=config)
        assert off(got, wanted) < 1e-2, config


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_models_quantized_while_loading(tmp_path, family, bits):
    save_tiny(family, tmp_path)
    for eager in (True, False):
        ids = generated(tmp_path, device="cuda", dtype="bfloat16", quantization=f"int{bits}", enforce_eager=eager)
        assert all(len(tokens) == 12 for tokens in ids)


def test_rows_of_another_type_are_multiplied_by_the_dequantized_weight():
    weight, wide = make_weight(Layout(4, 512, 128), 64, torch.bfloat16, "cuda")
    x = tensor(3, 512, dtype=torch.float32)
    torch.testing.assert_close(linear(x, weight, None), x @ wide.float().T, atol=1e-3, rtol=1e-3)
