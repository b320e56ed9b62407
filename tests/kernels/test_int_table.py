"""The choice of kernels for 4- and 8-bit weights."""

import pytest
import torch

from quire.kernels.int_linear import choose_plane, fused_linear
from quire.kernels.int_table import (
    BUCKETS,
    MAX_BLOCK_M,
    MEASURED,
    MEASURED_FUSED,
    MEASURED_SHORT,
    MEASURED_SHORT_FUSED,
    IntConfig,
    candidates,
    choose,
    choose_fused,
)
from quire.kernels.skinny_table import MAX_FUSED_ROWS
from quire.kernels.triton.skinny_linear import COUNTERS, WORKSPACE_FLOATS
from tests.kernels.int_cases import Layout, make_weight

SHAPES = [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (2048, 512), (768, 2048), (96, 40)]


@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize(("bits", "group"), [(4, 128), (4, 32), (8, 128), (8, 32), (8, 16)])
def test_every_choice_fits(bits, group, k, n):
    chunk = 16 // bits * choose_plane(k, 32 if k % group else group, bits)
    for rows in range(1, 2 * BUCKETS[-1]):
        config = choose(bits, rows, k, n, chunk)
        if config is not None:
            check(config, rows, k, n, chunk)
    for rows in range(1, MAX_FUSED_ROWS + 1):
        check(choose_fused(bits, rows, k, n, chunk), rows, k, n, chunk)
    assert choose(bits, 0, k, n, chunk) is None
    assert choose(bits, 4 * BUCKETS[-1], k, n, chunk) is None


def check(config: IntConfig, rows: int, k: int, n: int, chunk: int) -> None:
    block_m = config.block_m or 1 << (max(8, rows) - 1).bit_length()
    assert block_m <= MAX_BLOCK_M and config.block_n % 16 == 0
    tiles = -(-n // config.block_n) * -(-rows // block_m)
    assert config.splits <= max(1, -(-k // chunk))
    if config.splits > 1:  # sums of all splits are in the workspace
        halves = 2 if rows <= MAX_FUSED_ROWS else 1
        assert tiles <= COUNTERS and tiles * config.splits * halves * config.block_n * block_m <= WORKSPACE_FLOATS


def test_a_program_of_few_rows_has_all_of_them():
    for rows in (1, 16, 64):
        assert all(config.block_m == 0 for config in candidates(rows, 4096, 4096, 512))


def test_measured_shapes_take_the_measured_kernel(monkeypatch):
    best = IntConfig(128, splits=3)
    monkeypatch.setitem(MEASURED, (4, 8, 2560, 2560), best)
    monkeypatch.setitem(MEASURED, (4, 16, 2560, 2560), None)
    monkeypatch.setitem(MEASURED_FUSED, (4, 1, 2560, 1280), best)
    assert choose(4, 5, 2560, 2560, 512) == choose(4, 8, 2560, 2560, 512) == best
    assert choose(4, 9, 2560, 2560, 512) is None
    assert choose_fused(4, 1, 2560, 1280, 512) == best


def test_short_chunks_have_a_table_of_their_own(monkeypatch):
    best = IntConfig(128, splits=3)
    monkeypatch.setitem(MEASURED, (4, 8, 2560, 2560), best)
    assert choose(4, 8, 2560, 2560, 128) != best
    monkeypatch.setitem(MEASURED_SHORT, (4, 128, 8, 2560, 2560), None)
    monkeypatch.setitem(MEASURED_SHORT_FUSED, (4, 128, 1, 2560, 2560), best)
    assert choose(4, 8, 2560, 2560, 128) is None and choose_fused(4, 1, 2560, 2560, 128) == best


def test_the_norm_may_be_a_kernel_of_its_own(monkeypatch):
    weight, _ = make_weight(Layout(4, 256, 128), 32)
    x, norm = torch.randn(2, 256).half(), (torch.rand(256) + 0.5, 1e-6)
    wanted = fused_linear(x, weight, None, norm)
    monkeypatch.setitem(MEASURED_FUSED, (4, 2, 256, 32), IntConfig(64, norm_apart=True))
    torch.testing.assert_close(fused_linear(x, weight, None, norm), wanted, atol=1e-2, rtol=1e-2)
