"""The linears' kernels on a GPU at shapes of real models: against float32, in graphs, and the same bits each time."""

import pytest
import torch

from quire.kernels.quantize_fp8 import quantize_fp8, quantize_fp8_torch, rms_norm_quant, silu_mul_quant
from quire.kernels.rms_norm import rms_norm
from quire.kernels.silu_mul import silu_mul
from quire.kernels.skinny_linear import prepare_skinny_linear, skinny_linear, skinny_linear_torch
from quire.kernels.skinny_table import candidates
from quire.layers.linear import MergedColumnParallelLinear
from quire.quantization.fp8_linear import OnlineFp8LinearMethod

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = [(1024, 4096), (2048, 1024), (3072, 1024), (4096, 6144), (14336, 4096)]  # inputs, outputs


def tensor(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def off(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    prepare_skinny_linear(torch.device("cuda", 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize("rows", [1, 3, 7, 16, 33, 64])
def test_every_candidate(rows, k, n, dtype):
    x, weight, bias = tensor(rows, k, dtype=dtype), tensor(n, k, scale=k**-0.5, dtype=dtype), tensor(n, dtype=dtype)
    wanted = skinny_linear_torch(x, weight, bias, out_dtype=torch.float32)
    for config in candidates(2, rows, k, n):
        got = skinny_linear(x, weight, bias, config=config)
        assert off(got, wanted) < 5e-3, config
        assert torch.equal(got, skinny_linear(x, weight, bias, config=config)), config


@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 7, 64])
def test_every_candidate_in_fp8(rows, k, n):
    x = tensor(rows, k)
    weight, weight_scale = quantize_fp8(tensor(n, k, scale=k**-0.5))
    q, x_scale = quantize_fp8(x)
    exact = skinny_linear_torch(q, weight, weight_scale=weight_scale, x_scale=x_scale, out_dtype=torch.float32)
    kept = skinny_linear_torch(x, weight, weight_scale=weight_scale, out_dtype=torch.float32)
    for config in candidates(1, rows, k, n):
        arguments = {"config": config, "weight_scale": weight_scale, "out_dtype": torch.bfloat16}
        got = skinny_linear(q, weight, x_scale=x_scale, **arguments)
        assert off(got, exact) < 1e-2, config
        assert torch.equal(got, skinny_linear(q, weight, x_scale=x_scale, **arguments)), config
        if config.kind == "gemv":
            assert off(skinny_linear(x, weight, **arguments), kept) < 5e-3, config


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_fused(rows, pdl):
    k, n = 1024, 3072
    x, weight = tensor(rows, k), tensor(2 * n, k, scale=k**-0.5)
    residual, gain = tensor(rows, n), tensor(k)
    for config in candidates(2, rows, k, n):
        fused: dict = {"silu": True, "residual": residual}
        if config.kind == "gemv":
            fused["norm"] = (gain, 1e-6)
        wanted = skinny_linear_torch(x, weight, out_dtype=torch.float32, **fused)
        assert off(skinny_linear(x, weight, config=config, pdl=pdl, **fused), wanted) < 5e-3, config


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_a_chain_in_a_graph(rows, pdl):
    """Each product feeds the next, and the workspace is used again at once: a missed wait would show."""
    k = 2048
    weights = [tensor(k, k, scale=k**-0.5) for _ in range(8)]
    x = tensor(rows, k)
    for config in candidates(2, rows, k, k):

        def chain(config=config) -> torch.Tensor:
            y = x
            for weight in weights:
                y = skinny_linear(y, weight, config=config, pdl=pdl)
            return y

        wanted = chain().clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain()
        for _ in range(20):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, wanted), config


@pytest.mark.parametrize("width", [1024, 4096, 14336])
def test_quantize(width):
    x = tensor(33, width) * torch.logspace(-4, 3, 33, device="cuda")[:, None].bfloat16()
    for scale in (None, torch.tensor([0.02], device="cuda")):
        got, wanted = quantize_fp8(x, scale), quantize_fp8_torch(x, scale)
        assert torch.equal(got[1], wanted[1]) and torch.equal(got[0].float(), wanted[0].float())


def test_fused_quantization_equals_separate_kernels():
    x, gain = tensor(9, 4096), tensor(4096)
    for got, wanted in (
        (rms_norm_quant(x, None, gain, 1e-6)[:2], quantize_fp8(rms_norm(x, gain, 1e-6))),
        (silu_mul_quant(x), quantize_fp8(silu_mul(x))),
    ):
        assert torch.equal(got[1], wanted[1]) and torch.equal(got[0].float(), wanted[0].float())


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 5, 64, 65, 700])
def test_layer(rows, per_channel):
    """Few rows, more, and those that cuBLAS multiplies."""
    method = OnlineFp8LinearMethod(per_channel)
    device = torch.device("cuda", 0)
    layer = MergedColumnParallelLinear(1024, [512, 256], True, torch.bfloat16, device, method=method)
    weight = tensor(768, 1024, scale=0.03)
    for (name, shard), slot in layer.load_slots().items():
        with slot.opened() as view:
            view.copy_(weight.split([512, 256])[shard] if name == "weight" else torch.ones_like(view))
    layer.process_after_loading()
    x = tensor(rows, 1024)
    wanted = x.float() @ weight.float().T + 1.0
    assert off(layer(x), wanted) < 0.05
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("fixed", [False, True])
def test_nan_stays_nan_in_fp8(fixed):
    x = tensor(3, 1024)
    x[1, 7] = float("nan")
    scale = torch.tensor([0.01], device="cuda") if fixed else None
    (got, got_scale), (wanted, wanted_scale) = quantize_fp8(x, scale), quantize_fp8_torch(x, scale)
    torch.testing.assert_close(got.float(), wanted.float(), atol=0, rtol=0, equal_nan=True)
    torch.testing.assert_close(got_scale, wanted_scale, atol=0, rtol=0, equal_nan=True)
    assert got.float()[1, 7].isnan() and not got.float()[[0, 2]].isnan().any()
