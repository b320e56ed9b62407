"""Few combinations of many settings, such that any two values of different settings meet in one of them."""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

TRIES = 60

Combination = dict[str, Any]


def pairwise(axes: Mapping[str, Sequence[Any]], allowed: Callable[[Combination], bool]) -> list[Combination]:
    """Greedily the combination of the most new pairs, of some tried at random around an uncovered pair; always the same
    ones. `allowed` is asked about pairs and whole combinations. Those first in the list cover most."""
    rng = random.Random(0)
    missing = {
        (a, i, b, j)
        for a, b in itertools.combinations(axes, 2)
        for i, j in itertools.product(range(len(axes[a])), range(len(axes[b])))
        if allowed({a: axes[a][i], b: axes[b][j]})
    }
    found = []
    while missing:
        tried = []
        for _ in range(TRIES):
            a, i, b, j = rng.choice(sorted(missing))
            places = {name: rng.randrange(len(values)) for name, values in axes.items()} | {a: i, b: j}
            if allowed({name: axes[name][place] for name, place in places.items()}):
                tried.append(places)
        assert tried, f"no combination is allowed for {sorted(missing)[:3]}"
        best = max(tried, key=lambda places: len(missing & _pairs(places)))
        missing -= _pairs(best)
        found.append({name: axes[name][place] for name, place in best.items()})
    return found


def _pairs(places: dict[str, int]) -> set[tuple[str, int, str, int]]:
    return {(a, i, b, j) for (a, i), (b, j) in itertools.combinations(places.items(), 2)}
