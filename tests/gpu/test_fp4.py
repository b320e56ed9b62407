"""Kernels of 4-bit floats (MXFP4, NVFP4) on a GPU: against float32, in graphs, linears and experts."""

from dataclasses import replace

import pytest
import torch

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
    InputRounding,
    IntExpertWeights,
    experts_torch,
    fused_layer,
    fused_layer_torch,
    moe_triton,
    route_torch,
)
from quire.kernels.moe import prepare_moe as prepare_experts
from quire.kernels.moe_routing import Routing
from quire.kernels.round_fp4 import round_mxfp4, round_mxfp4_torch, round_nvfp4, round_nvfp4_torch
from tests.gpu.test_int_linear import off, replayed_equals, tensor
from tests.kernels.int_cases import Layout, make_weight, rounded_experts_torch
from tests.models.test_mxfp4 import save_mxfp4
from tests.quantization.fp4_checkpoints import modelopt, mxfp4, nvfp4
from tests.quantization.test_int_checkpoints import WIDE, checkpoints
from tests.quantization.test_methods import generated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MXFP4, NVFP4 = Layout(4, 2880, 32, kind="e2m1"), Layout(4, 4096, 16, kind="e2m1", factors=True)
EXPERTS = (16, 4, 1440, 736)  # experts, chosen, hidden size, intermediate size


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    prepare_int_linear(torch.device("cuda", 0))
    prepare_experts(torch.device("cuda", 0))


def test_every_code_is_exact():
    """All numbers with scales of one, through an identity matrix, in every kernel."""
    for dtype in (torch.bfloat16, torch.float16):
        for group in (16, 32, 128):
            weight, wanted = make_weight(Layout(4, 512, group, kind="e2m1"), 512, dtype, "cuda")
            assert torch.equal(dequantize(weight), wanted)
            identity = torch.eye(512, device="cuda", dtype=dtype)
            for config in candidates(64, 512, 512, weight.fields * weight.plane):
                got = torch.cat([int_linear(rows, weight, config=config) for rows in identity.split(64)])
                assert torch.equal(got, wanted.T), (dtype, group, config)


@pytest.mark.parametrize("layout", [MXFP4, NVFP4], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 17, 64, 256])
def test_every_candidate(rows, layout):
    n = 2880
    weight, _ = make_weight(layout, n, torch.bfloat16, "cuda")
    x, bias = tensor(rows, layout.inputs), tensor(n)
    wanted = int_linear_torch(x, weight, bias)
    for config in candidates(rows, layout.inputs, n, weight.fields * weight.plane):
        got = int_linear(x, weight, bias, config=config)
        assert off(got, wanted) < 5e-3, config
        assert torch.equal(got, int_linear(x, weight, bias, config=config)), config


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("layout", [MXFP4, NVFP4], ids=str)
@pytest.mark.parametrize("rows", [1, 2])
def test_fused(rows, layout, pdl):
    k, n = layout.inputs, 1440
    weight, _ = make_weight(layout, 2 * n, torch.bfloat16, "cuda")
    x, fused = tensor(rows, k), {"norm": (tensor(k).float(), 1e-6), "residual": tensor(rows, n), "silu": True}
    wanted = int_linear_torch(x, weight, **fused)
    for config in candidates(rows, k, n, weight.fields * weight.plane):
        assert off(int_linear(x, weight, config=config, pdl=pdl, **fused), wanted) < 8e-3, config


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("rows", [1, 64, 256, 1000])
def test_a_chain_in_a_graph(rows, group):
    k = 2048
    layout = Layout(4, k, group, kind="e2m1", factors=group == 16)
    weights = [make_weight(layout, k, torch.bfloat16, "cuda")[0] for _ in range(6)]
    x = tensor(rows, k)
    options = [None, *candidates(rows, k, k, weights[0].fields * weights[0].plane)] if rows < 1000 else [None]
    for config in options:

        def chain(config=config) -> torch.Tensor:
            y = x
            for weight in weights:
                y = linear(y, weight, None) if config is None else int_linear(y, weight, config=config)
            return y

        replayed_equals(chain, config)


def make_experts(group: int) -> IntExpertWeights:
    num_experts, _, hidden, width = EXPERTS
    layouts = [Layout(4, k, group, kind="e2m1", factors=group == 16) for k in (hidden, width)]
    gate_up, _ = make_weight(layouts[0], 2 * width, torch.bfloat16, "cuda", num_experts)
    down, _ = make_weight(layouts[1], hidden, torch.bfloat16, "cuda", num_experts)
    biases = tensor(num_experts, 2 * width), tensor(num_experts, hidden)
    return IntExpertWeights(gate_up, down, *biases, activation="swigluoai")


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("rows", [1, 3, 64, 256, 2000])
def test_experts(rows, group):
    num_experts, top_k, hidden, _ = EXPERTS
    w = make_experts(group)
    x, logits, residual = tensor(rows, hidden), tensor(rows, num_experts), tensor(rows, hidden)
    wanted = experts_torch(x, *route_torch(logits, Routing(top_k, "topk_softmax")), w.dequantized(), residual)
    few = few_candidates() if rows <= 3 else []
    for config in (None, *few, *grouped_candidates(rows, EXPERTS)):

        def run(config=config) -> torch.Tensor:
            return moe_triton(x, logits, w, Routing(top_k, "topk_softmax"), residual=residual, config=config)

        assert off(run(), wanted) < 1e-2, config
        if rows in (1, 64, 256):
            replayed_equals(run, config)


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("rows", [1, 64, 256, 2000])
def test_experts_whose_inputs_are_rounded(rows, group):
    num_experts, top_k, hidden, _ = EXPERTS
    w = replace(make_experts(group), gate_up_bias=None, down_bias=None)
    if group == 16:
        scales = (torch.rand(num_experts, device="cuda") + 0.5 for _ in range(2))
        w = replace(w, rounding=InputRounding(*scales))
    else:
        w = replace(w, rounding=InputRounding())
    x, logits = tensor(rows, hidden), tensor(rows, num_experts)
    wanted = rounded_experts_torch(x, *route_torch(logits, Routing(top_k, "topk_softmax")), w.dequantized(), w.rounding)
    few = few_candidates() if rows == 1 else []
    for config in (None, *few, *grouped_candidates(rows, EXPERTS)):

        def run(config=config) -> torch.Tensor:
            return moe_triton(x, logits, w, Routing(top_k, "topk_softmax"), config=config)

        assert off(run(), wanted) < 5e-2, config
        if rows in (1, 64, 256):
            replayed_equals(run, config)


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_whole_layer_of_experts(rows, group):
    num_experts, top_k, hidden, _ = EXPERTS
    w, x, gain = make_experts(group), tensor(rows, hidden), torch.rand(hidden, device="cuda") + 0.5
    layer = (x, (gain, 1e-6), tensor(num_experts, hidden, scale=0.1), tensor(num_experts))
    wanted = fused_layer_torch(*layer, w, Routing(top_k, "topk_softmax"), residual=x)
    for config in (None, *few_candidates()):
        assert off(fused_layer(*layer, w, Routing(top_k, "topk_softmax"), residual=x, config=config), wanted) < 1e-2, (
            config
        )


def test_experts_of_gpt_oss_take_little_more_than_4_bits():
    hidden = width = 2880
    weight, _ = make_weight(Layout(4, hidden, 32, kind="e2m1"), 2 * width, torch.bfloat16, "cuda", 2)
    assert weight.nbytes * 8 / (2 * 2 * width * hidden) < 4.4
    assert torch.equal(dequantize_torch(weight), dequantize(weight))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gpt_oss_at_4_bits_says_what_it_says_dequantized(tmp_path, dtype):
    save_mxfp4(tmp_path)
    wanted = generated(tmp_path, device="cuda", dtype=dtype, quantization="dequantized", enforce_eager=True)
    for eager in (True, False):
        ids = generated(tmp_path, device="cuda", dtype=dtype, enforce_eager=eager)
        same = sum(a == b for ours, theirs in zip(ids, wanted, strict=True) for a, b in zip(ours, theirs, strict=True))
        assert same >= 0.5 * sum(map(len, wanted)), "tiny random models have near ties"


@pytest.mark.parametrize("rows", [1, 64, 256])
def test_rounded_activations_in_a_graph(rows):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = tensor(rows, 2 * 2880, scale=3.0, dtype=dtype)[:, :2880]
        for times in (224.0, 0.01):
            assert torch.equal(round_nvfp4(x, times), round_nvfp4_torch(x, times))
        assert torch.equal(round_mxfp4(x), round_mxfp4_torch(x))
    replayed_equals(lambda: round_nvfp4(x, 224.0), rows)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        *((name, "qwen3-moe") for name in ("nvfp4", "nvfp4 W4A4", "mxfp4", "mxfp4 W4A4", "modelopt")),
        *(("nvfp4", family) for family in ("llama", "qwen3", "gemma3", "mixtral")),
        ("nvfp4 W4A4", "llama"),
    ],
)
def test_checkpoints(tmp_path, name, family):
    made = {"nvfp4": nvfp4(), "nvfp4 W4A4": nvfp4(True), "mxfp4": mxfp4(), "mxfp4 W4A4": mxfp4(True)}
    ours, _ = checkpoints(tmp_path, family, made.get(name) or modelopt(), **WIDE)
    wanted = generated(ours, device="cuda", dtype="bfloat16", quantization="dequantized", enforce_eager=True)
    for eager in (True, False):
        ids = generated(ours, device="cuda", dtype="bfloat16", enforce_eager=eager)
        first = [(a[0], b[0]) for a, b in zip(ids, wanted, strict=True)]
        assert sum(a == b for a, b in first) >= 0.6 * len(first), "tiny random models have near ties"
