"""Weights quantized to 8 and 4 bits while loading, for a GPU; here by the torch versions of its kernels."""

import pytest
import torch

from quire.layers.linear import MergedColumnParallelLinear
from quire.quantization.int_online import OnlineIntLinearMethod, quantize_int
from quire.quantization.int_triton import TritonIntKernel

DTYPE = torch.bfloat16


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def method(bits: int) -> OnlineIntLinearMethod:
    return OnlineIntLinearMethod(bits, TritonIntKernel(DTYPE))


@pytest.mark.parametrize(("bits", "steps"), [(4, 15), (8, 254)])
def test_a_weight_moves_by_at_most_half_a_step(bits, steps):
    weight = torch.randn(5, 256)
    weight[1, :128] = 0
    codes, scales, zeros = quantize_int(weight, bits, 128)
    points = torch.full_like(scales, 128) if zeros is None else zeros.float()
    got = (codes.float().unflatten(1, (2, 128)) - points[..., None]) * scales[..., None]
    groups = weight.unflatten(1, (2, 128))
    span = groups.amax(-1) - groups.amin(-1) if bits == 4 else 2 * groups.abs().amax(-1)
    assert ((got - groups).abs() <= 1.01 * span[..., None] / steps).all()
    assert (got[1, 0] == 0).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_layer(bits):
    layer = MergedColumnParallelLinear(192, [64, 32], True, DTYPE, torch.device("cpu"), method=method(bits))
    weight = torch.randn(96, 192, dtype=DTYPE)
    for (name, shard), slot in layer.load_slots().items():
        with slot.opened() as view:
            view.copy_(weight.split([64, 32])[shard] if name == "weight" else torch.ones_like(view))
    layer.process_after_loading()
    assert not hasattr(layer, "weight")
    x = torch.randn(7, 192, dtype=DTYPE)
    wanted = x.float() @ weight.float().T + 1
    error = (layer(x).float() - wanted).norm() / wanted.norm()
    assert error < (0.12 if bits == 4 else 0.01)


def test_inputs_that_cannot_be_divided_into_groups():
    with pytest.raises(ValueError, match="multiple of 32; one has 100"):
        MergedColumnParallelLinear(100, [64], False, DTYPE, torch.device("cpu"), method=method(4))
