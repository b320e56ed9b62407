"""Low-rank terms compiled for a Hopper device without one."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from quire.kernels.dispatch import INTERPRETED
from quire.kernels.triton import lora
from tests.kernels.launched import launched

pytestmark = pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted")


@pytest.mark.parametrize("rank", [16, 256])
def test_registers_hold_a_tile(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of query, key and value of a model of 8B parameters."""
    a, b, x, out = (
        torch.empty(shape, dtype=torch.bfloat16)
        for shape in ((2, 3 * rank, 4096), (2, 6144, rank), (1, 4096), (1, 6144))
    )
    slots, ranks = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    kernels = launched(monkeypatch, lambda: lora.add_low_rank(out, x, slots, ranks, a, b, (4096, 5120)))
    assert [kernel.name for kernel in kernels] == ["_shrink_kernel", "_expand_kernel"]
    for one in kernels:
        assert "mma.sync" in one.kernel.asm["ptx"] and one.fits and one.spilled_bytes(tmp_path) == 0
