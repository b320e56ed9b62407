"""An adapter as it is read: factors of a model's linear layers.

Arrays are numpy's: a torch operation in the loader's thread would start a pool of threads that compete with the steps.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quire.layers.load_slot import ShardId

Factors = tuple[np.ndarray, np.ndarray]  # A [rank, in] and B [out, rank], float32, the scale in B
# [outputs, inputs] of a layer's shard in the checkpoint; None where it takes no adapter.
FullShape = Callable[[str, ShardId], tuple[int, int] | None]


@dataclass(frozen=True)
class Adapter:
    """Factors of the whole model, by layer and shard as its WeightMap names them."""

    factors: dict[tuple[str, ShardId], Factors]
    content: bytes  # a hash of the files, which decide about results

    @property
    def rank(self) -> int:
        return max((len(a) for a, _ in self.factors.values()), default=0)
