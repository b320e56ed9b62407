"""Sums of chunks of rows: the torch version, and the choice of a kernel."""

from collections.abc import Sequence

import numpy as np
import torch

from quire.kernels import native
from quire.kernels.transfer import to_device


def sum_rows_torch(x: torch.Tensor, firsts: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
    """x [N, D] -> [chunks, D] float32: of counts[i] rows from firsts[i] on. Chunks do not overlap, and are in order."""
    if sum(counts) < len(x):
        x = torch.cat([x[first : first + count] for first, count in zip(firsts, counts, strict=True)])
    (lengths,) = to_device(x.device, counts, dtype=np.int64)
    return torch.segment_reduce(x.float(), "sum", lengths=lengths, axis=0)


def sum_rows(x: torch.Tensor, firsts: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
    if not native.serves(x):
        return sum_rows_torch(x, firsts, counts)
    return native.sum_rows(x, *to_device(x.device, firsts, counts, dtype=np.int64))
