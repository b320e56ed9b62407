"""Kernels of `--batch-invariant` compiled for a Hopper device without one."""

import re

import pytest
import torch

triton = pytest.importorskip("triton")
from quire.kernels.dispatch import INTERPRETED  # noqa: E402
from quire.kernels.paged_attention import AttentionFeatures, AttentionShape  # noqa: E402
from quire.kernels.triton import invariant_attention, invariant_linear  # noqa: E402
from tests.kernels.launched import Launched, launched  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted")


def linear(monkeypatch, rows: int, outputs: int, inputs: int, **how: bool) -> list[Launched]:
    x, weight = torch.empty(rows, inputs).bfloat16(), torch.empty(outputs, inputs).bfloat16()
    norm = (torch.empty(inputs).bfloat16(), 1e-6) if how.get("norm") else None
    residual = torch.empty(rows, outputs).bfloat16() if how.get("residual") else None
    return launched(
        monkeypatch,
        lambda: invariant_linear.invariant_linear(x, weight, None, norm, residual, how.get("silu", False)),
    )


PRODUCTS = [  # of layers like Qwen3-0.6B's and Llama-3-8B's
    (4096, 1024, {"norm": True}),
    (1024, 3072, {"residual": True}),
    (6144, 1024, {"norm": True, "silu": True}),
    (6144, 4096, {}),
    (4096, 14336, {"residual": True}),
    (28672, 4096, {"norm": True, "silu": True}),
]


@pytest.mark.parametrize(("outputs", "inputs", "how"), PRODUCTS)
def test_products_of_any_rows_are_by_the_same_instructions(monkeypatch, tmp_path, outputs, inputs, how):
    """The weight is the left operand, 16 inputs are one instruction's; only the number of its columns differs."""
    kinds = set()
    for rows in (1, 4, 16, 64, 256, 2048):
        for each in linear(monkeypatch, rows, outputs, inputs, **how):
            assert each.fits and each.spilled_bytes(tmp_path) < 128, (each.name, rows)
            code = each.kernel.asm["ptx"]
            products = set(re.findall(r"wgmma\.mma_async\.\S+\.m64n\d+k16", code))
            squares = set(re.findall(r"mma\.sync\.\S+\.m\d+n\d+k\d+", code))
            assert each.name == "_norm_kernel" or products, (each.name, rows)
            assert squares <= {"mma.sync.aligned.m16n8k16"}, (each.name, rows)
            assert bool(squares) == (bool(how.get("norm")) and each.name != "_many_kernel"), (each.name, rows)
            kinds.add(each.name)
    assert kinds == {"_few_kernel", "_many_kernel"} | ({"_norm_kernel"} if how.get("norm") else set())


def attention(monkeypatch, queries: int, splits: int, group: int = 2, size: int = 128) -> Launched:
    """`queries` of a block; 0: for rows of one query."""
    heads = 8 * group
    space = invariant_attention.PartsWorkspace(64, [AttentionShape(heads, 8, size)], torch.device("cpu"))
    q, cache = torch.empty(4, heads, size).bfloat16(), torch.empty(4, 2, 8, 16, size).bfloat16()
    row = torch.zeros(4, dtype=torch.int32)
    batch = (row, row if queries else None, row, row.view(1, 4), space, AttentionFeatures(0.1))
    blocks = row.view(2, 2) if queries else None

    def call():
        invariant_attention.invariant_attention(q, q, cache, blocks, *batch, queries=queries or 1, splits=splits)

    (found,) = launched(monkeypatch, call)
    return found


@pytest.mark.parametrize(("group", "size"), [(2, 128), (4, 128), (1, 64), (8, 256)])
def test_attention_of_prompts_and_decode_rows_is_by_the_same_instructions(monkeypatch, tmp_path, group, size):
    queries = invariant_attention.queries_per_block(group, torch.bfloat16)
    kernels = [attention(monkeypatch, *each, group, size) for each in ((queries, 1), (0, 1), (0, 4))]
    for each in kernels:
        assert each.fits and each.spilled_bytes(tmp_path) < 128  # outside of the loops
        code = each.kernel.asm["ptx"]
        assert set(re.findall(r"(?:wgmma|mma)\S*\.m\d+n\d+k\d+", code)) == {"mma.sync.aligned.m16n8k16"}
        assert "fma.rn.f32" not in code  # products and sums are rounded each
        # Nothing is summed but by these instructions, whose order is that of the keys.
        assert not re.findall(r"(?<!@)redux|arith.addf[^\n]*\n[^\n]*tt.reduce.return", each.kernel.asm["ttgir"])
