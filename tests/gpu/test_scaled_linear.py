"""8-bit rows and weights on a GPU at shapes of real models: fp8 with a scale per block, fp8 weights alone, int8."""

import pytest
import torch

from quire.kernels.quantize_fp8 import (
    FP8,
    quantize_fp8,
    quantize_fp8_torch,
    quantize_int8,
    quantize_torch,
    rms_norm_quant,
    silu_mul_quant,
)
from quire.kernels.rms_norm import rms_norm
from quire.kernels.scaled_linear import dequantize_fp8, dequantize_fp8_torch, has_library_blocks, scaled_linear
from quire.kernels.scaled_table import candidates
from quire.kernels.silu_mul import silu_mul
from quire.kernels.skinny_linear import prepare_skinny_linear, skinny_linear, skinny_linear_torch
from quire.kernels.skinny_table import candidates as skinny_candidates
from quire.kernels.skinny_table import for_groups
from quire.layers.linear import MergedColumnParallelLinear
from quire.quantization.compressed_int import CompressedScheme
from quire.quantization.fp8_blocks import GroupedFp8LinearMethod
from quire.quantization.fp8_config import Fp8Scheme
from quire.quantization.int8_triton import W8A8Kernel
from quire.quantization.int_linear import IntLinearMethod
from tests.quantization.fp8_checkpoints import block_fp8, compressed_fp8, modelopt_fp8
from tests.quantization.int_checkpoints import w8a8
from tests.quantization.test_fp8_checkpoints import checkpoints
from tests.quantization.test_int_checkpoints import generated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = [(4096, 6144), (14336, 4096), (1024, 4096)]  # inputs, outputs
GROUPS = (128, 128)
DEVICE = torch.device("cuda", 0)


def tensor(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def off(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


def blocks(n: int, k: int, groups: tuple[int, int] = GROUPS) -> tuple[torch.Tensor, torch.Tensor]:
    scale = (torch.rand(n // groups[0], k // groups[1], device="cuda") + 0.5) * k**-0.5
    return tensor(n, k).to(FP8), scale


def replayed_equals(run, what) -> None:
    wanted = run().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(20):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, wanted), what


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    prepare_skinny_linear(DEVICE)


@pytest.mark.parametrize("width", [1024, 4096, 14336])
def test_quantize(width):
    x = tensor(33, width) * torch.logspace(-4, 3, 33, device="cuda")[:, None].bfloat16()
    got, wanted = quantize_fp8(x, group=128), quantize_fp8_torch(x, group=128)
    assert torch.equal(got[1], wanted[1]) and torch.equal(got[0].float(), wanted[0].float())
    for scale in (None, torch.tensor([0.02], device="cuda")):
        got, wanted = quantize_int8(x, scale), quantize_torch(x, scale, dtype=torch.int8)
        assert torch.equal(got[1], wanted[1]) and torch.equal(got[0], wanted[0])


def test_fused_quantization_equals_separate_kernels():
    x, gain = tensor(9, 4096), tensor(4096)
    for got, wanted in (
        (rms_norm_quant(x, None, gain, 1e-6, group=128)[:2], quantize_fp8(rms_norm(x, gain, 1e-6), group=128)),
        (silu_mul_quant(x, group=128), quantize_fp8(silu_mul(x), group=128)),
    ):
        assert torch.equal(got[1], wanted[1]) and torch.equal(got[0].float(), wanted[0].float())


@pytest.mark.parametrize("groups", [GROUPS, (64, 128), (16, 32)])
@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 7, 64])
def test_few_rows_of_blocks(rows, k, n, groups):
    x, (weight, scale) = tensor(rows, k), blocks(n, k, groups)
    q, x_scale = quantize_fp8(x, group=groups[1])
    exact = skinny_linear_torch(q, weight, weight_scale=scale, x_scale=x_scale, groups=groups, out_dtype=torch.float32)
    kept = skinny_linear_torch(x, weight, weight_scale=scale, groups=groups, out_dtype=torch.float32)
    for each in skinny_candidates(1, rows, k, n):
        config = for_groups(each, groups)
        arguments: dict = {"config": config, "weight_scale": scale, "groups": groups, "out_dtype": torch.bfloat16}
        assert off(skinny_linear(x, weight, **arguments), kept) < 6e-3, config
        if config.kind == "dot":
            got = skinny_linear(q, weight, x_scale=x_scale, **arguments)
            assert off(got, exact) < 1e-2, config
            assert torch.equal(got, skinny_linear(q, weight, x_scale=x_scale, **arguments)), config


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_fused(rows, pdl):
    k, n = 4096, 3072
    x, (weight, scale) = tensor(rows, k), blocks(2 * n, k)
    fused: dict = {"silu": True, "residual": tensor(rows, n), "norm": (tensor(k).float(), 1e-6)}
    wanted = skinny_linear_torch(x, weight, weight_scale=scale, groups=GROUPS, out_dtype=torch.float32, **fused)
    for each in skinny_candidates(1, rows, k, n):
        if each.kind == "gemv":
            config = for_groups(each, GROUPS)
            got = skinny_linear(x, weight, config=config, weight_scale=scale, groups=GROUPS, pdl=pdl, **fused)
            assert off(got, wanted) < 8e-3, config


@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize("rows", [65, 256, 1001, 4096])
def test_many_rows_of_blocks(rows, k, n):
    (weight, scale), bias = blocks(n, k), tensor(n)
    q, x_scale = quantize_fp8(tensor(rows, k), group=128)
    wanted = skinny_linear_torch(
        q, weight, bias, weight_scale=scale, x_scale=x_scale, groups=GROUPS, out_dtype=torch.float32
    )
    has_library_blocks(DEVICE)
    for config in (None, *candidates("blocks", rows)):

        def run(config=config) -> torch.Tensor:
            return scaled_linear(q, weight, x_scale, scale, bias, torch.bfloat16, GROUPS, config)

        assert off(run(), wanted) < 1e-2, config
        if rows == 256:
            replayed_equals(run, config)


def test_the_library_has_blocks_on_hopper():
    if torch.cuda.get_device_capability() == (9, 0):
        assert has_library_blocks(DEVICE)


@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 7, 64, 65, 256, 4096])
def test_int8(rows, k, n):
    x, bias = tensor(rows, k), tensor(n)
    weight, scale = quantize_int8(tensor(n, k, scale=k**-0.5))
    q, x_scale = quantize_int8(x)
    exact = skinny_linear_torch(q, weight, bias, weight_scale=scale, x_scale=x_scale, out_dtype=torch.float32)
    if rows <= 64:
        for config in skinny_candidates(1, rows, k, n):
            arguments: dict = {"config": config, "weight_scale": scale, "out_dtype": torch.bfloat16}
            if config.kind == "gemv":
                kept = skinny_linear_torch(x, weight, bias, weight_scale=scale, out_dtype=torch.float32)
                assert off(skinny_linear(x, weight, bias, **arguments), kept) < 5e-3, config
            else:
                assert off(skinny_linear(q, weight, bias, x_scale=x_scale, **arguments), exact) < 5e-3, config
        return
    for config in (None, *candidates("int8", rows)):
        got = scaled_linear(q, weight, x_scale, scale, bias, torch.bfloat16, config=config)
        assert off(got, exact) < 5e-3, config


@pytest.mark.parametrize("groups", [None, GROUPS, (16, 32)])
def test_dequantize(groups):
    weight = tensor(3, 768, 1024).to(FP8)
    scale = (
        torch.rand(3, 768, device="cuda")
        if groups is None
        else torch.stack([blocks(768, 1024, groups)[1] for _ in range(3)])
    )
    got = dequantize_fp8(weight, scale, groups, torch.bfloat16)
    assert torch.equal(got, dequantize_fp8_torch(weight, scale, groups, torch.bfloat16))


def fp8_layer(scheme: Fp8Scheme) -> tuple[MergedColumnParallelLinear, torch.Tensor]:
    layer = MergedColumnParallelLinear(
        1024, [512, 256], True, torch.bfloat16, DEVICE, method=GroupedFp8LinearMethod(scheme)
    )
    meant = []
    filled: dict = {}
    for (name, shard), slot in layer.load_slots().items():
        with slot.opened() as view:
            values = torch.rand(view.shape, device="cuda") * 0.02 if "scale" in name else tensor(*view.shape)
            view.copy_(values)
            filled[name, shard] = view.float().clone()
    layer.process_after_loading()
    for shard in (0, 1):
        weight, scale = filled["weight", shard], filled["weight_scale", shard]
        if scheme.block is not None:
            scale = scale.repeat_interleave(scheme.block[0], 0).repeat_interleave(scheme.block[1], 1)
        meant.append(weight * (scale if scheme.block is not None else scale.view(-1, 1)))
    return layer, torch.cat(meant)


SCHEMES = {
    "blocks": Fp8Scheme(block=GROUPS),
    "W8A16": Fp8Scheme(per_channel=True, activations="none"),
    "W8A16, blocks": Fp8Scheme(block=GROUPS, activations="none"),
}


@pytest.mark.parametrize("rows", [1, 2, 5, 64, 256, 1000])
@pytest.mark.parametrize("name", SCHEMES)
def test_an_fp8_layer_in_a_graph(name, rows):
    layer, weight = fp8_layer(SCHEMES[name])
    x = tensor(rows, 1024)
    wanted = x.float() @ weight.T + layer.bias.float()
    assert off(layer(x), wanted) < (0.05 if name == "blocks" and rows > 2 else 1e-2)
    replayed_equals(lambda: layer(x), name)


@pytest.mark.parametrize("rows", [1, 2, 5, 64, 256, 1000])
@pytest.mark.parametrize("static", [False, True])
def test_a_w8a8_layer_in_a_graph(rows, static):
    scheme = CompressedScheme(8, -1, packed=False, symmetric=True, int8_inputs=True, static_inputs=static)
    method = IntLinearMethod(scheme, W8A8Kernel(torch.bfloat16))
    layer = MergedColumnParallelLinear(1024, [512, 256], False, torch.bfloat16, DEVICE, method=method)
    for (name, _), slot in layer.load_slots().items():
        if not slot.optional:
            with slot.opened() as view:
                view.copy_(
                    {
                        "weight": torch.randint(-127, 128, view.shape, device="cuda"),
                        "weight_scale": torch.rand(view.shape, device="cuda") * 1e-3,
                        "input_scale": torch.full(view.shape, 4 / 127, device="cuda"),
                    }[name]
                )
    layer.process_after_loading()
    x = tensor(rows, 1024)
    wanted = x.float() @ (layer.weight.float() * layer.weight_scale[:, None]).T
    assert off(layer(x), wanted) < (0.03 if rows > 2 else 1e-2)
    replayed_equals(lambda: layer(x), rows)


FORMATS = {
    "channel": compressed_fp8("channel"),
    "blocks": block_fp8(),
    "compressed blocks": compressed_fp8((16, 32), "group"),
    "W8A16": compressed_fp8("channel", None),
    "W8A16, blocks": compressed_fp8((32, 32), None),
    "modelopt": modelopt_fp8(),
    "W8A8": w8a8(),
    "W8A8 static": w8a8(static=True),
}


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
@pytest.mark.parametrize("name", FORMATS)
def test_models(tmp_path, name, family):
    """In float32 a GPU dequantizes fp8; in bfloat16 it multiplies as stored, in graphs and without."""
    ours, plain = checkpoints(tmp_path, family, FORMATS[name])
    wanted = generated(plain, device="cuda", dtype="float32")
    for eager in (True, False):
        found = generated(ours, device="cuda", dtype="bfloat16", enforce_eager=eager)
        # A random model multiplies every error; a wrong scale would make it as likely as any token.
        assert (found.prompt_logprobs - wanted.prompt_logprobs).abs().mean() < 0.5
