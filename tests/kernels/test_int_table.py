"""The choice of kernels for 4- and 8-bit weights."""

import pytest

from quire.kernels.int_linear import choose_plane
from quire.kernels.int_table import BUCKETS, MAX_BLOCK_M, MEASURED, IntConfig, candidates, choose, choose_fused
from quire.kernels.skinny_table import MAX_FUSED_ROWS

SHAPES = [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (2048, 512), (768, 2048), (96, 40)]


@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_every_choice_fits(bits, k, n):
    chunk = 16 // bits * choose_plane(k, 32 if k % 128 else 128, bits)
    for rows in range(1, 2 * BUCKETS[-1]):
        config = choose(bits, rows, k, n, chunk)
        if config is not None:
            check(config, rows, k, n, chunk)
    for rows in range(1, MAX_FUSED_ROWS + 1):
        check(choose_fused(bits, rows, k, n, chunk), rows, k, n, chunk)
    assert choose(bits, 0, k, n, chunk) is None
    assert choose(bits, 4 * BUCKETS[-1], k, n, chunk) is None


def check(config: IntConfig, rows: int, k: int, n: int, chunk: int) -> None:
    block_m = config.block_m or max(8, rows)
    assert block_m <= MAX_BLOCK_M and config.block_n % 16 == 0
    tiles = -(-n // config.block_n) * -(-rows // block_m)
    assert config.splits <= max(1, -(-k // chunk))
    if config.splits > 1:  # sums of all splits are in the workspace
        assert tiles <= 8192 and tiles * config.splits * 2 * config.block_n * 2 * block_m <= 8 << 20


def test_a_program_of_few_rows_has_all_of_them():
    for rows in (1, 16, 64):
        assert all(config.block_m == 0 for config in candidates(rows, 4096, 4096, 512))


def test_measured_shapes_are_candidates_of_their_rows():
    assert all(key[1] in BUCKETS for key in MEASURED)
