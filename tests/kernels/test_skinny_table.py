import pytest

from quire.kernels.skinny_table import BUCKETS, MEASURED, SkinnyConfig, candidates, choose
from quire.kernels.triton.skinny_linear import COUNTERS, MAX_SHARED, WORKSPACE_FLOATS

SIZES = [(576, 960), (1024, 4096), (2048, 1024), (3072, 1024), (4096, 28672), (14336, 4096), (1024, 151936), (64, 96)]


@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize(("k", "n"), SIZES)
def test_every_candidate_fits_the_device(itemsize, k, n):
    for rows in BUCKETS:
        for c in candidates(itemsize, rows, k, n):
            tiles = -(-n // c.block_n)
            if c.kind == "gemv":
                assert rows <= 4 and c.splits == 1
                continue
            block_m = max(16, rows)
            assert c.splits == 1 or (
                2 * tiles * c.splits * c.block_n * block_m <= WORKSPACE_FLOATS and tiles <= COUNTERS
            )
            assert 2 * (2 * c.block_n + block_m) * c.block_k * itemsize <= MAX_SHARED


def test_choice():
    assert choose(2, 65, 4096, 4096) is None and choose(2, 0, 4096, 4096) is None
    assert choose(2, 1, 4090, 4096) is None  # rows of the weight must start at aligned addresses
    one, three = choose(2, 1, 2560, 2560), choose(2, 3, 2560, 2560)
    assert one is not None and one.kind == "gemv" and three == choose(2, 4, 2560, 2560)


def test_measured_shapes_take_the_measured_kernel(monkeypatch):
    best = SkinnyConfig("dot", 64, 128, stages=3, splits=3)
    monkeypatch.setitem(MEASURED, (2, 8, 2560, 2560), best)
    monkeypatch.setitem(MEASURED, (2, 16, 2560, 2560), None)
    assert choose(2, 5, 2560, 2560) == choose(2, 8, 2560, 2560) == best
    assert choose(2, 9, 2560, 2560) is None
