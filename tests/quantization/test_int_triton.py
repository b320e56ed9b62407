"""Integer weights in the packed form of the GPU, by the torch versions of its kernels; tests/gpu has the kernels."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from quire.kernels.int_linear import PackedIntWeight, pack_int_weight
from quire.quantization.int_triton import TritonIntKernel, packed_of

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Decoded:
    bits: int
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_size: int
    group_of: torch.Tensor | None = None
    order: torch.Tensor | None = None
    kind: str = "int"
    factors: torch.Tensor | None = None

    def in_group_order(self):
        return self, self.order

    def dequantize_into(self, out):
        out.copy_(self.dequantized())

    def dequantized(self):
        groups = torch.arange(self.codes.shape[1]) // self.group_size if self.group_of is None else self.group_of
        zeros = 1 << (self.bits - 1) if self.zeros is None else self.zeros[:, groups]
        return (self.codes.float() - zeros) * self.scales[:, groups]


def decoded(outputs: int, inputs: int, group_size: int, bits: int = 4, zeros: bool = False, **rest) -> Decoded:
    groups = inputs // group_size
    codes = torch.randint(1 << bits, (outputs, inputs), dtype=torch.uint8)
    scales = (torch.rand(outputs, groups) / 8).half().float()
    points = torch.randint(1 << bits, (outputs, groups), dtype=torch.int16) if zeros else None
    return Decoded(bits, codes, scales, points, group_size, **rest)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def prepared(*weights: Decoded) -> nn.Module:
    layer = nn.Module()
    TritonIntKernel(DTYPE).prepare(layer, weights, "model.layers.0.mlp.gate_proj")
    return layer


def check(layer: nn.Module, *weights: Decoded) -> None:
    x = torch.randn(5, weights[0].codes.shape[1], dtype=DTYPE)
    bias = torch.randn(sum(len(w.codes) for w in weights), dtype=DTYPE)
    columns = [x.float()[:, w.order] if w.order is not None else x.float() for w in weights]
    wanted = torch.cat([c @ w.dequantized().T for c, w in zip(columns, weights, strict=True)], 1) + bias.float()
    torch.testing.assert_close(TritonIntKernel(DTYPE).apply(layer, x, bias).float(), wanted, atol=0.05, rtol=0.02)


@pytest.mark.parametrize(("bits", "zeros"), [(4, False), (4, True), (8, False), (8, True)])
def test_members_of_a_fused_layer_are_one_weight(bits, zeros):
    weights = [decoded(n, 256, 64, bits, zeros) for n in (48, 16, 16)]
    layer = prepared(*weights)
    packed = packed_of(layer)
    assert packed is not None and packed.outputs == 80
    assert packed.scale_dtype is torch.float16, "scales that bfloat16 would round"
    check(layer, *weights)


def test_one_scale_per_output():
    weight = decoded(40, 192, 192, 8)
    layer = prepared(weight)
    assert packed_of(layer) is not None
    check(layer, weight)


def test_members_with_inputs_in_different_orders_are_multiplied_one_by_one():
    weights = [decoded(16, 128, 32, order=torch.randperm(128)) for _ in range(2)]
    layer = prepared(*weights)
    assert len(layer.int_parts) == 2 and packed_of(layer) is None and not TritonIntKernel(DTYPE).can_fuse(layer)
    check(layer, *weights)


@pytest.mark.parametrize(
    ("weight", "why"),
    [
        (decoded(16, 96, 24), "groups of 24 inputs"),
        (decoded(16, 128, 32, group_of=torch.arange(128) // 40), "different numbers of inputs"),
    ],
)
def test_what_cannot_be_packed_is_dequantized(caplog, weight, why):
    layer = prepared(weight)
    assert isinstance(layer.int_parts[0].weight, torch.Tensor) and why in caplog.text
    check(layer, weight)


@pytest.mark.parametrize(
    ("codes", "scales", "zeros", "bits", "wrong"),
    [
        ((16, 64), (16, 3), None, 4, "cannot be divided into 3 groups"),
        ((16, 64), (16, 8), None, 4, "multiples of 16"),
        ((16, 64), (8, 2), None, 4, "codes .* have scales"),
        ((16, 64), (16, 2), (16, 1), 4, "zero points"),
        ((16, 64), (16, 2), None, 3, "3 bits"),
    ],
)
def test_wrong_shapes(codes, scales, zeros, bits, wrong):
    points = None if zeros is None else torch.zeros(zeros)
    with pytest.raises(ValueError, match=wrong):
        pack_int_weight(torch.zeros(codes, dtype=torch.uint8), torch.ones(scales), points, bits, DTYPE)


def test_a_packed_weight_is_as_small_as_it_can_be():
    weight = decoded(4096, 4096, 128)
    packed = pack_int_weight(weight.codes, weight.scales, None, 4, DTYPE)
    assert isinstance(packed, PackedIntWeight)
    assert packed.nbytes == 4096 * 4096 // 2 + 4096 * 32 * 2


def test_floats_have_4_bits_and_no_zero_points():
    codes, scales = torch.zeros(16, 64, dtype=torch.uint8), torch.ones(16, 4)
    with pytest.raises(ValueError, match="e2m1 have 4 bits and no zero points"):
        pack_int_weight(codes, scales, torch.zeros(16, 4), 4, DTYPE, "e2m1")
    with pytest.raises(ValueError, match=r"factors are \[8\]; allowed: \[16\]"):
        pack_int_weight(codes, scales, None, 4, DTYPE, "e2m1", torch.ones(8))


@pytest.mark.parametrize(("group", "bits"), [(16, 4.5), (32, 4.25)])
def test_scales_of_4_bit_floats_stay_bytes(group, bits):
    codes = torch.randint(16, (64, 1024), dtype=torch.uint8)
    scales = torch.full((64, 1024 // group), 0.125)
    packed = pack_int_weight(codes, scales, None, 4, DTYPE, "e2m1")
    assert packed.nbytes * 8 == bits * 64 * 1024 and packed.plane == 128 and packed.parts == 128 // group
    scales[3, 5] = 0.3  # neither a power of two nor e4m3
    packed = pack_int_weight(codes, scales, None, 4, DTYPE, "e2m1")
    assert packed.parts == 1 and packed.plane == group
