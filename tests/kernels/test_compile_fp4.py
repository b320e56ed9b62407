"""Kernels of 4-bit weights compiled for a Hopper device without one: the interpreter does not check what it does."""

import pytest

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from quire.kernels.dispatch import INTERPRETED  # noqa: E402
from quire.kernels.triton import int_dequantize, int_experts, int_linear, round_fp4  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted")

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {"words": "*i16"}
POINTERS |= dict.fromkeys(("x", "y", "inner", "bias", "residual"), "*bf16")
POINTERS |= dict.fromkeys(("factors", "partial", "weights", "gain"), "*fp32")
POINTERS |= dict.fromkeys(("scales", "arrived", "experts", "order", "tile_expert", "tile_rows"), "*i32")
FLOATS = ("eps", "global_scale")
# Codes, inputs of a plane, and words of scales of a chunk and output.
FORMATS = [("int", 128, 2), ("e2m1", 16, 2), ("mxfp4", 32, 1), ("mxfp4", 128, 4), ("nvfp4", 64, 4), ("nvfp4", 128, 8)]
by_format = pytest.mark.parametrize(("codes", "plane", "count"), FORMATS)


def compiled(kernel, constants: dict, warps: int = 4, stages: int = 3, **pointers: str):
    """Pointers are multiples of 16 bytes, as in a model."""
    names, types = kernel.arg_names, POINTERS | dict.fromkeys(FLOATS, "fp32") | pointers
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    divisible = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if "*" in signature[name]}
    values = {(i,): constants[name] for i, name in enumerate(names) if name in constants}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=divisible)
    return triton.compile(source, target=HOPPER, options={"num_warps": warps, "num_stages": stages})


def layout(codes: str, plane: int, count: int) -> dict:
    factors = codes in ("nvfp4", "e2m1")
    flags = {
        "PLANE": plane, "BITS": 4, "COUNT": count, "CODES": codes, "ZEROS": False, "PER_CHANNEL": False,
        "SCALE_BF16": True, "FACTORS": factors, "EVEN_K": False, "INTERPRETED": False,
    }  # fmt: skip
    return flags if factors else flags | {"factors": None}


def group_of(codes: str, plane: int, count: int) -> int:
    return plane // count if codes in ("mxfp4", "nvfp4") else plane


@by_format
def test_linear(codes, plane, count):
    common = layout(codes, plane, count) | {
        "BLOCK_N": 64, "SPLIT": True, "NORM_BLOCK": 4096, "HAS_BIAS": False, "HAS_RESIDUAL": False, "SILU": True,
        "STAGES": 3, "PREFETCHED": 4, "PDL": True, "bias": None, "residual": None,
    }  # fmt: skip
    few = common | {"BLOCK_M": 8, "ROWS": 1, "HAS_NORM": True, "SUB": plane, "PRESCALED": False}
    assert "mma" in compiled(int_linear._linear_kernel, few).asm["ptx"]
    many = common | {"BLOCK_M": 64, "ROWS": 1, "HAS_NORM": False, "gain": None, "PRESCALED": True}
    many["SUB"] = min(32, group_of(codes, plane, count))
    assert "mma" in compiled(int_linear._linear_kernel, many).asm["ptx"]


@by_format
def test_experts(codes, plane, count):
    common = layout(codes, plane, count) | {"TOP_K": 4, "HAS_BIAS": True, "STAGES": 3, "PDL": True}
    first = common | {
        "X_EACH": 4, "BLOCK_M": 8, "BLOCK_N": 32, "SWIGLUOAI": True
    }  # fmt: skip
    compiled(int_experts._few_gate_up_kernel, first, warps=2)
    second = common | {"BLOCK_M": 8, "BLOCK_N": 32, "HAS_RESIDUAL": True, "PREFETCHED": 4}
    compiled(int_experts._few_down_kernel, second, warps=2)
    group = group_of(codes, plane, count)
    for rows, prescaled in ((16, False), (64, True)):
        tiles = {"X_EACH": 1, "GATE_UP": True, "BLOCK_M": rows, "BLOCK_N": 64, "SWIGLUOAI": True}
        compiled(int_experts._grouped_kernel, common | tiles | {"SUB": min(32, group), "PRESCALED": prescaled})


@by_format
def test_dequantize(codes, plane, count):
    compiled(int_dequantize._dequantize_kernel, layout(codes, plane, count) | {"DTYPE": tl.bfloat16, "PANELS": 4})


@pytest.mark.parametrize(("mx", "by_expert"), [(True, False), (False, False), (False, True)])
def test_round(mx, by_expert):
    constants = {
        "EACH": 1, "GROUP": 32 if mx else 16, "GROUPS": 32, "MX": mx, "BY_EXPERT": by_expert, "LARGEST": 6.0,
        "FP8_MAX": 448.0,
    }  # fmt: skip
    constants |= {} if by_expert else {"scales": None, "experts": None}
    compiled(round_fp4._kernel, constants, scales="*fp32")
