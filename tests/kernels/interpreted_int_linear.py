"""Kernels of 4- and 8-bit weights against torch references, in Triton's interpreter: run by test_interpreter.py."""

import pytest
import torch

import tests.kernels.interpreter_fix  # noqa: F401
from quire.kernels.int_linear import (
    dequantize,
    dequantize_torch,
    int_linear,
    int_linear_torch,
    join_outputs,
    lookup,
)
from quire.kernels.int_table import IntConfig
from quire.kernels.triton.skinny_linear import SplitWorkspace
from tests.kernels.int_cases import LAYOUTS, make_weight

torch.set_num_threads(1)  # tensors are tiny
CONFIGS = {
    "whole": IntConfig(32, stages=2),
    "split": IntConfig(16, stages=2, splits=3),
    "tiles of rows": IntConfig(16, stages=2, splits=2, block_m=16),
    "weights scaled": IntConfig(32, stages=2, block_m=32, sub=32, prescaled=True),
}
FUSED = ("plain", "bias", "residual", "silu", "silu, bias, residual")
FUSED_FOR_FEW = ("norm", "norm, silu")


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).half()  # the interpreter multiplies matrices in float16, but not in bfloat16


def check(x, weight, config, **arguments):
    wanted = int_linear_torch(x, weight, **arguments)
    got = int_linear(x, weight, config=config, **arguments)
    torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2)
    assert not SplitWorkspace.of(x.device).arrived.any()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_dequantized(layout):
    weight, wanted = make_weight(layout, 40)
    torch.testing.assert_close(dequantize(weight), wanted, atol=0, rtol=0)
    assert torch.equal(dequantize_torch(weight), wanted)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rows_that_are_looked_up(layout):
    weight, wide = make_weight(layout, 40)
    ids = torch.tensor([39, 0, 15, 16, 39])
    assert torch.equal(lookup(weight, ids), wide[ids]) and torch.equal(lookup(weight, ids.int()), wide[ids])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_outputs_of_several_weights_are_joined(layout):
    found = [make_weight(layout, outputs) for outputs in (48, 16, 8)]
    joined = join_outputs([weight for weight, _ in found])
    assert joined is not None and joined.outputs == 72
    assert torch.equal(dequantize(joined), torch.cat([wide for _, wide in found]))
    assert join_outputs([found[2][0], found[1][0]]) is None, "8 outputs are no whole panel"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout(layout):
    weight, _ = make_weight(layout, 40)
    wide = tensor(3, 2 * weight.inputs)  # rows of x apart, as in a slice of a larger tensor
    for name in ("split", "weights scaled"):
        check(wide[:, : weight.inputs], weight, CONFIGS[name])


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.kind == "e2m1"], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 20])
def test_rows_of_floats(rows, layout):
    """Few rows have a column for each group of a plane, more are read group by group."""
    weight, _ = make_weight(layout, 64)
    x = tensor(rows, weight.inputs)
    check(x, weight, CONFIGS["split"], bias=tensor(64))
    if rows > 2:
        check(x, weight, CONFIGS["weights scaled"], residual=tensor(rows, 64))
        check(x, weight, CONFIGS["tiles of rows"], silu=True)
    else:
        check(x, weight, CONFIGS["whole"], silu=True, norm=(tensor(weight.inputs).float(), 1e-5))


@pytest.mark.parametrize(
    ("rows", "name"), [(1, "whole"), (3, "split"), (17, "whole"), (64, "tiles of rows"), (40, "weights scaled")]
)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", ["zeros", "centres"])
def test_rows(kind, bits, name, rows):
    weight, _ = make_weight(next(layout for layout in LAYOUTS if layout.bits == bits and getattr(layout, kind)), 40)
    check(tensor(rows, weight.inputs), weight, CONFIGS[name], bias=tensor(40))


@pytest.mark.parametrize("fused", FUSED + FUSED_FOR_FEW)
@pytest.mark.parametrize(
    ("layout", "name"),
    [(LAYOUTS[0], "whole"), (LAYOUTS[2], "split"), (LAYOUTS[14], "split"), (LAYOUTS[-1], "split")],
    ids=str,
)
def test_fused(layout, name, fused):
    n, rows = 48, 2
    outputs = 2 * n if "silu" in fused else n
    weight, _ = make_weight(layout, outputs)
    arguments: dict = {"silu": "silu" in fused}
    if "bias" in fused:
        arguments["bias"] = tensor(outputs)
    if "residual" in fused:
        arguments["residual"] = tensor(rows, n)
    if "norm" in fused:
        arguments["norm"] = (tensor(weight.inputs).float(), 1e-5)
    check(tensor(rows, weight.inputs), weight, CONFIGS[name], **arguments)
