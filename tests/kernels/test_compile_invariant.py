"""Kernels of `--batch-invariant` compiled for a Hopper device without one."""

import re

import pytest

triton = pytest.importorskip("triton")
from triton.compiler import ASTSource  # noqa: E402

from quire.kernels.dispatch import INTERPRETED  # noqa: E402
from quire.kernels.triton import invariant_attention, invariant_linear  # noqa: E402
from tests.kernels.test_compile import FLOAT, HALF, HOPPER, INT, compiled  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted")


def matrix_layouts(kernel) -> set[str]:
    return set(re.findall(r"#ttg\.nvidia_mma<.*?>|#ttg\.nvidia_mma.*", kernel.asm["ttgir"]))


@pytest.mark.parametrize("split", [False, True])
def test_linear(split):
    types = {"x": HALF, "w": HALF, "y": HALF, "partial": FLOAT, "arrived": INT}
    block_m, block_n, block_k = invariant_linear.HALF_TILE
    constants = {
        "bias": None, "SLABS": 4, "SLAB": 512, "SPLIT": split, "BLOCK_M": block_m, "BLOCK_N": block_n,
        "BLOCK_K": block_k, "STAGES": 4, "EVEN_K": True, "HAS_BIAS": False, "PDL": True,
    }  # fmt: skip
    kernel = compiled(invariant_linear._invariant_linear_kernel, types, constants, stages=4)
    assert "wgmma.mma_async.sync.aligned.m64n64k16" in kernel.asm["ptx"]


def attention(decode: bool, split: bool):
    kernel = invariant_attention._invariant_kernel
    pointers = ["query_blocks", "rows", "query_start", "seq_lens", "block_table", "arrived"]
    types = dict.fromkeys(pointers, INT) | dict.fromkeys(("q", "out", "kv_cache", "token_scales"), HALF)
    types |= dict.fromkeys(("partial_out", "partial_sum", "slopes", "sinks"), FLOAT)
    types |= dict.fromkeys(("scale", "softcap", "v_scale"), "fp32") | {"table_stride": "i32", "splits": "i32"}
    constants = {
        "H": 16, "KV": 8, "D": 128, "DP": 128, "BLOCK_SIZE": 16, "BLOCK_M": 64, "QUERIES": 1 if decode else 32,
        "TILE": 64, "DECODE": decode, "DECODE_ONLY": decode, "SPLIT": split, "WINDOW": 0, "SOFTCAP": False,
        "ALIBI": False, "SINKS": False, "PAGE": 0, "SCALE_PAGE": 0, "V_SCALED": False, "MAX_PARTS": 32, "PDL": True,
    }  # fmt: skip
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if "*" in signature[name]}
    values = {(i,): constants[name] for i, name in enumerate(names) if name in constants}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    options = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}
    return triton.compile(source, target=HOPPER, options=options)


def test_attention_of_prompts_and_decode_rows_is_by_the_same_instructions():
    kernels = [attention(False, False), attention(True, False), attention(True, True)]
    products = [set(re.findall(r"wgmma\.mma_async\S+", kernel.asm["ptx"])) for kernel in kernels]
    assert products[0] and products.count(products[0]) == len(products)
    layouts = [matrix_layouts(kernel) for kernel in kernels]
    assert layouts[0] and layouts.count(layouts[0]) == len(layouts)
    assert not any("fma.rn.f32" in kernel.asm["ptx"] for kernel in kernels)  # products and sums are rounded each
