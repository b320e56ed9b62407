"""Experts of many rows compiled for a Hopper device without one, as they are chosen for known models."""

import re

import pytest
import torch

triton = pytest.importorskip("triton")

from quire.kernels.dispatch import INTERPRETED  # noqa: E402
from quire.kernels.moe import ExpertWeights  # noqa: E402
from quire.kernels.moe_table import GroupedConfig, choose  # noqa: E402
from quire.kernels.triton.moe_grouped import grouped_experts  # noqa: E402
from tests.kernels.launched import launched  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted")

V2_LITE = (66, 8, 2048, 1408)


@pytest.mark.parametrize("rows", [64, 256])
def test_tiles(monkeypatch, tmp_path, rows):
    experts, top_k, hidden, width = V2_LITE
    config = choose(rows, V2_LITE)
    assert isinstance(config, GroupedConfig)

    def half(*shape):
        return torch.empty(shape, dtype=torch.bfloat16)

    chosen, places = (torch.zeros(rows, top_k, dtype=torch.int32) for _ in range(2))
    w = ExpertWeights(half(experts, 2 * width, hidden), half(experts, hidden, width))

    def multiply():
        grouped_experts(half(rows, hidden), torch.ones(rows, top_k), chosen, places, w, config, None, False)

    kernels = [one for one in launched(monkeypatch, multiply) if one.name == "_grouped_kernel"]
    assert len(kernels) == 2
    for one in kernels:
        ptx = one.kernel.asm["ptx"]
        assert one.fits and one.spilled_bytes(tmp_path) == 0
        assert f"m64n{config.block_m}k16" in ptx
        # Rows are copied past the registers, 16 bytes at a time, those without a pair not at all.
        assert "cp.async.cg" in ptx and "cp.async.ca" not in ptx
        assert set(re.findall(r"st\.global\S*", ptx)) == {"st.global.v4.b32"}
