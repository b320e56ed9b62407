"""An adapter as it is read: factors of a model's linear layers.

Arrays are numpy's: a torch operation in the loader's thread would start a pool of threads that compete with the steps.
numpy has no bfloat16, so arrays hold the bits of numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from quire.layers.load_slot import ShardId

Factors = tuple[np.ndarray, np.ndarray]  # A [rank, in] and B [out, rank], bits of the slots' type, the scale in B
NewMemory = Callable[[int], np.ndarray]  # of this many bytes, uint8
# [outputs, inputs] of a layer's shard in the checkpoint; None where it takes no adapter.
FullShape = Callable[[str, ShardId], tuple[int, int] | None]

INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}  # its bits; NaNs have more


@dataclass(frozen=True)
class Adapter:
    """Factors of the whole model, by layer and shard as its WeightMap names them."""

    factors: dict[tuple[str, ShardId], Factors]
    content: bytes  # a hash of the files, which decide about results

    @property
    def rank(self) -> int:
        return max((len(a) for a, _ in self.factors.values()), default=0)


def bits_of(values: torch.Tensor) -> np.ndarray:
    """numpy's view of the memory, integers."""
    found: np.ndarray = values.view({2: torch.int16, 4: torch.int32}[values.dtype.itemsize]).numpy()
    return found


def are_finite(bits: np.ndarray, dtype: torch.dtype) -> bool:
    """Without temporary arrays: the greatest positive number has the greatest bits as signed integers, the least
    negative one as unsigned."""
    infinity, sign = INFINITY[dtype], 1 << (8 * dtype.itemsize - 1)
    return bool(bits.max() < infinity and bits.view(f"u{dtype.itemsize}").max() < sign + infinity)


def scaled(bits: np.ndarray, stored: torch.dtype, scale: float, dtype: torch.dtype) -> np.ndarray:
    """Numbers of type `stored` times `scale` in float32, rounded to `dtype`: in place if that is as large.
    OverflowError if float32 cannot hold them."""
    if stored == dtype and np.float32(scale) == 1:
        return bits
    wide = _widened(bits, stored)
    if np.float32(scale) != 1:
        with np.errstate(over="ignore", invalid="ignore"):
            wide *= np.float32(scale)
        if not are_finite(wide.view(np.int32), torch.float32):
            raise OverflowError
    narrow = _rounded(wide, dtype)
    if narrow.itemsize != bits.itemsize:
        return narrow
    bits[...] = narrow
    return bits


def _widened(bits: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """A copy in float32."""
    if dtype == torch.bfloat16:
        wide = bits.astype(np.int32)
        wide <<= 16
        return wide.view(np.float32)
    return bits.view(np.float16 if dtype == torch.float16 else np.float32).astype(np.float32)


def _rounded(wide: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The bits in `dtype`, to the nearest, ties to even."""
    if dtype == torch.float32:
        return wide.view(np.int32)
    if dtype == torch.float16:
        with np.errstate(over="ignore"):
            halves = wide.astype(np.float16).view(np.int16)
        if not are_finite(halves, dtype):
            raise ValueError("it has values that float16 cannot hold; use --dtype bfloat16")
        return halves
    bits = wide.view(np.uint32)
    rounded = (bits >> 16) & 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    narrow = rounded.astype(np.uint16).view(np.int16)
    if not are_finite(narrow, dtype):
        raise ValueError("it has values that bfloat16 cannot hold; use --dtype float32")
    return narrow
