"""Low-rank terms compiled for a Hopper device without one."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from quire.kernels.dispatch import INTERPRETED
from quire.kernels.lora import LowRank, RowTerms
from quire.kernels.skinny_table import choose_fused
from quire.kernels.triton import lora, skinny_linear
from tests.kernels.launched import Launched, launched

pytestmark = pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted")

# Of a model of 8B parameters: inputs, outputs, where parts of these end.
LAYERS = {"query, key, value": (4096, (4096, 5120, 6144)), "gate, up": (4096, (14336, 28672)), "down": (14336, (4096,))}


def weights(layer: str, rank: int) -> LowRank:
    num_inputs, ends = LAYERS[layer]
    shapes = ((2, len(ends) * rank, num_inputs), (2, ends[-1], rank))
    a, b = (torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)
    inner = torch.empty(2, lora.row_splits(num_inputs)[0], a.shape[1], dtype=torch.int64)
    terms = torch.empty(2, ends[-1], dtype=torch.int64)
    return LowRank(a, b, ends, torch.zeros(2, dtype=torch.int32), inner, terms)


def assert_stores_are_wide(one: Launched) -> None:
    """A mask that may change from one element to the next makes each a store of its own."""
    ptx = one.kernel.asm["ptx"]
    assert "st.global.v4.b32" in ptx and "st.global.b16" not in ptx


@pytest.mark.parametrize("tokens", [1, 257, 2049])
@pytest.mark.parametrize(("layer", "rank"), [("query, key, value", 16), ("query, key, value", 256), ("down", 16)])
def test_registers_hold_a_tile(layer, rank, tokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w = weights(layer, rank)
    x, out = (torch.empty(tokens, size, dtype=torch.bfloat16) for size in (LAYERS[layer][0], LAYERS[layer][1][-1]))

    def call() -> None:
        grouped = lora.group_tokens(torch.zeros(tokens, dtype=torch.int32), 2)
        lora.add_low_rank(out, x, grouped, w.ranks, w.a, w.b, w.boundaries)

    group, *kernels = launched(monkeypatch, call)
    assert [kernel.name for kernel in (group, *kernels)] == ["_group_kernel", "_shrink_kernel", "_expand_kernel"]
    assert group.spilled_bytes(tmp_path) == 0
    for one in kernels:
        product = "mma.sync" if tokens == 1 else "wgmma"
        assert product in one.kernel.asm["ptx"] and one.fits and one.spilled_bytes(tmp_path) == 0
    assert_stores_are_wide(kernels[-1])


@pytest.mark.parametrize("tokens", [1, 257, 2049])
def test_gated(tokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w = weights("gate, up", 16)
    x, out = (torch.empty(tokens, size, dtype=torch.bfloat16) for size in (4096, 28672))
    grouped = []

    def call() -> None:
        grouped.append(lora.group_tokens(torch.zeros(tokens, dtype=torch.int32), 2))
        lora.gated_low_rank(out, x, grouped[0], w.ranks, w.a, w.b)

    _, _, expand = launched(monkeypatch, call)
    assert expand.name == "_expand_gated_kernel" and "cp.async" in expand.kernel.asm["ptx"]
    assert expand.fits and expand.spilled_bytes(tmp_path) == 0
    assert_stores_are_wide(expand)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("layer", LAYERS)
def test_rows_and_their_terms(layer, rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w, (num_inputs, ends) = weights(layer, 16), LAYERS[layer]
    x, gain, weight = (
        torch.empty(shape, dtype=torch.bfloat16) for shape in ((rows, num_inputs), num_inputs, (ends[-1], num_inputs))
    )
    silu, norm = layer == "gate, up", None if layer == "down" else (gain, 1e-5)
    slots, config = torch.zeros(rows, dtype=torch.int32), choose_fused(2, rows, num_inputs, ends[-1])
    arguments = (config, None, None, None, None, norm, silu, torch.bfloat16, True, None)

    def call() -> None:
        terms = RowTerms(slots, torch.zeros(1, dtype=torch.int32), w)
        skinny_linear.skinny_linear(x, weight, *arguments, terms)

    (product,) = launched(monkeypatch, call)
    assert product.name == "_gemv_kernel" and "ld.volatile.global" in product.kernel.asm["ptx"]
    assert product.spilled_bytes(tmp_path) <= 32
