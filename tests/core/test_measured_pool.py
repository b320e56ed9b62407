"""How long blocks stay in the cache."""

from quire.core.measured_pool import MeasuredBlockPool
from quire.messages.requests import RESIDENCY_SECONDS


def seen(pool: MeasuredBlockPool) -> list[tuple[int, float]]:
    """Number and sum of lifetimes, idle times and gaps between hits."""
    assert all(len(part) == len(RESIDENCY_SECONDS) + 2 for part in pool.residency)
    return [(int(sum(part[:-1])), part[-1]) for part in pool.residency]


def test_the_times_of_a_block() -> None:
    times = iter([0.0, 3.0, 5.0, 15.0])
    pool = MeasuredBlockPool(1, 1.0, clock=lambda: next(times))
    (block,) = pool.allocate(1)
    pool.register(block, (b"a", 0))
    pool.free([block])
    for _ in range(2):  # hits
        pool.touch([block])
        pool.free([block])
    assert seen(pool) == [(0, 0.0), (0, 0.0), (1, 2.0)]
    pool.allocate(1)
    assert seen(pool) == [(1, 15.0), (1, 10.0), (1, 2.0)]


def test_only_a_sample_is_followed() -> None:
    draws = iter([0.05, 0.5, 0.01, 0.9])
    pool = MeasuredBlockPool(4, 0.1, draw=lambda: next(draws))
    pool.free(pool.allocate(4))
    pool._draw = lambda: 1.0
    pool.allocate(4)
    assert seen(pool)[0][0] == 2


def test_a_reset_forgets() -> None:
    pool = MeasuredBlockPool(2, 1.0)
    pool.free(pool.allocate(2))
    pool.unregister_all()
    pool.allocate(2)
    assert seen(pool)[0][0] == 0
