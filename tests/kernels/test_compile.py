"""8-bit kernels compiled for a Hopper device without one: the interpreter does not check what the compiler does."""

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from quire.kernels.dispatch import INTERPRETED  # noqa: E402
from quire.kernels.triton import (  # noqa: E402
    moe_few,
    moe_grouped,
    moe_route,
    quantize_fp8,
    scaled_linear,
    skinny_linear,
)
from tests.kernels.routings import ROUTINGS  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted")

HOPPER = GPUTarget("cuda", 90, 32)
FP8, INT8, HALF, FLOAT, INT = "*fp8e4nv", "*i8", "*bf16", "*fp32", "*i32"
BLOCKS, NONE = {"GROUP_N": 128, "GROUP_K": 128}, {"GROUP_N": 0, "GROUP_K": 0}
NO_EXTRAS = {"HAS_BIAS": False, "HAS_RESIDUAL": False, "bias": None, "residual": None}
NO_TERMS = dict.fromkeys(("slots", "lora_step", "ranks", "a", "b", "inner", "terms")) | {
    "SPLITS": 0, "SPLIT_INPUTS": 0, "SPLIT_RANKS": 0, "SPLITS_EVEN": 0, "RANKS": 0, "OUTPUTS": 0
}  # fmt: skip
SIZES = (
    "rows",
    "shrinks",
    "expands",
    "splits",
    "width",
    "rank",
    "second",
    "third",
    "K",
    "N",
    "M",
    "H",
    "D",
    "x_stride",
    "x_scale_stride",
)


def compiled(kernel, types: dict[str, str], constants: dict[str, object], warps: int = 4, stages: int = 3):
    """The compiled kernel: pointers and sizes are multiples of 16, as in a model."""
    types = dict.fromkeys(SIZES, "i32") | {"eps": "fp32"} | types
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    divisible = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if "*" in signature[name]}
    values = {(i,): constants[name] for i, name in enumerate(names) if name in constants}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=divisible)
    return triton.compile(source, target=HOPPER, options={"num_warps": warps, "num_stages": stages})


def tile(kind: str, *shape: int) -> str:
    return f"tensordesc<{kind.lstrip('*')}{list(shape)}>"


@pytest.mark.parametrize(("kind", "groups"), [(FP8, BLOCKS), (INT8, NONE)], ids=["blocks", "int8"])
def test_many_rows(kind, groups):
    types = {"x": tile(kind, 64, 128), "w": tile(kind, 128, 128), "y": HALF, "x_scale": FLOAT, "w_scale": FLOAT}
    constants = groups | {
        "bias": None, "HAS_BIAS": False, "BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 128, "STAGES": 3, "NEIGHBOURS": 8,
        "EVEN_K": True, "INTEGERS": kind == INT8, "TMA": True,
    }  # fmt: skip
    assert "wgmma" in compiled(scaled_linear._kernel, types, constants).asm["ptx"]


@pytest.mark.parametrize(
    ("x", "weight", "groups"),
    [(FP8, FP8, NONE), (FP8, FP8, BLOCKS), (HALF, FP8, BLOCKS), (HALF, FP8, NONE), (INT8, INT8, NONE)],
)
def test_few_rows(x, weight, groups):
    types = {"x": x, "w": weight, "y": HALF, "w_scale": FLOAT, "x_scale": FLOAT, "partial": FLOAT, "arrived": INT}
    constants = groups | NO_EXTRAS | {
        "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "SPLIT": True, "STAGES": 4, "EVEN_K": True, "LINES": 8,
        "LINE": 128, "HAS_W_SCALE": groups is NONE, "HAS_X_SCALE": x != HALF, "SILU": True, "PDL": True,
    }  # fmt: skip
    constants |= {"x_scale": None} if x == HALF else {}
    assert "wgmma" in compiled(skinny_linear._dot_kernel, types, constants, stages=4).asm["ptx"]


@pytest.mark.parametrize(("weight", "groups"), [(FP8, BLOCKS), (INT8, NONE)], ids=["blocks", "int8"])
def test_one_row(weight, groups):
    types = {"x": HALF, "w": weight, "y": HALF, "w_scale": FLOAT, "norm_weight": FLOAT}
    constants = groups | NO_EXTRAS | NO_TERMS | {
        "x_scale": None, "ROWS": 1, "BLOCK_N": 4, "BLOCK_K": 4096, "STAGES": 1, "ONE_STEP": True, "EVEN_K": True,
        "HAS_NORM": True, "HAS_W_SCALE": groups is NONE, "HAS_X_SCALE": False, "SILU": True, "PDL": True,
    }  # fmt: skip
    compiled(skinny_linear._gemv_kernel, types, constants, stages=1)


@pytest.mark.parametrize("groups", [NONE, BLOCKS], ids=["channel", "blocks"])
def test_experts(groups):
    types = {"x": HALF, "w": FP8, "inner": HALF, "norm_weight": FLOAT, "experts": INT, "scale": FLOAT}
    common = {"bias": None, "HAS_BIAS": False, "TOP_K": 8, "STAGES": 1, "PDL": True, "HAS_SCALE": True, **groups}
    constants = common | {
        "BLOCK_N": 4, "BLOCK_K": 2048, "ONE_STEP": True, "EVEN_K": True, "HAS_NORM": True, "SWIGLUOAI": False
    }  # fmt: skip
    compiled(moe_few._gate_up_kernel, types, constants, stages=1)
    types |= {"y": HALF, "residual": HALF, "weights": FLOAT}
    constants = common | {
        "BLOCK_J": 8, "BLOCK_N": 2, "BLOCK_K": 256, "ONE_STEP": False, "EVEN": True, "HAS_RESIDUAL": True
    }  # fmt: skip
    compiled(moe_few._down_kernel, types, constants, stages=1)
    for x in (HALF, FP8):
        types = {"x": x, "w": tile(FP8, 64, 128), "y": HALF, "w_scale": FLOAT, "x_scale": FLOAT}
        types |= dict.fromkeys(("order", "tile_expert", "tile_rows"), INT)
        constants = groups | {
            "bias": None, "HAS_BIAS": False, "TOP_K": 8, "GATE_UP": True, "BLOCK_M": 64, "BLOCK_N": 64,
            "BLOCK_K": 128, "STAGES": 3, "EVEN_K": True, "TMA": True, "HAS_W_SCALE": True, "HAS_X_SCALE": x == FP8,
            "SWIGLUOAI": False, "PDL": True,
        }  # fmt: skip
        constants |= {"x_scale": None} if x == HALF else {}
        assert "wgmma" in compiled(moe_grouped._grouped_kernel, types, constants).asm["ptx"]


@pytest.mark.parametrize(("kind", "group"), [(FP8, 128), (FP8, 0), (INT8, 0)])
def test_quantize(kind, group):
    types = {"x": HALF, "q": kind, "scales": FLOAT}
    constants = {
        "residual": None, "weight": None, "fixed_scale": None, "BLOCK": 4096, "MODE": quantize_fp8.SILU,
        "HAS_SCALE": False, "GROUP": group, "LARGEST": 448.0 if kind == FP8 else 127.0, "SMALLEST_MAX": 1e-10,
    }  # fmt: skip
    compiled(quantize_fp8._kernel, types, constants)


def test_dequantize():
    types = {"w": FP8, "scale": FLOAT, "out": HALF}
    compiled(scaled_linear._dequantize_kernel, types, {"BLOCK": 4096, **BLOCKS})


@pytest.mark.parametrize("name", ["DeepSeek-V2", "DeepSeek-V3", "ERNIE-4.5"])
def test_routing(name):
    count, routing, has_bias = ROUTINGS[name]
    bias = torch.zeros(count) if has_bias else None
    flags = moe_route._flags(routing, count, bias) | {"PDL": True}
    types = {name: FLOAT for name in ("logits", "weights", "correction", "norm_weight")}
    types |= {name: INT for name in ("experts", "places", "counts", "arrived")} | {"E": "i32", "stride": "i32"}
    none = {} if has_bias else {"correction": None}
    compiled(moe_route._route_kernel, types, flags | none | {"COUNT": True})
    extra = {"BLOCK_N": 4, "BLOCK_H": 2048, "HAS_NORM": True, "HAS_BIAS": False, "KEEPS_NORMED": False}
    fused = flags | none | extra | {"bias": None, "normed": None}
    compiled(moe_route._router_kernel, types | {"x": HALF, "router": HALF}, fused)
