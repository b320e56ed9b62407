"""The low-rank terms of adapters on a CPU."""

import torch

from quire.kernels.native import TYPES, native_function


def add_low_rank(
    out: torch.Tensor,
    x: torch.Tensor,
    slots: torch.Tensor,
    ranks: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bounds: tuple[int, int],
) -> None:
    assert out.is_contiguous()
    x = x.contiguous()
    rows, width, (_, num_outputs, rank) = len(x), a.shape[1], b.shape
    if b.stride() != (rank * num_outputs, 1, num_outputs):  # as lora/layers.py makes it; torch cannot be recorded
        b = b.transpose(1, 2).contiguous().transpose(1, 2)
    inner = torch.empty(rows, width, dtype=torch.float32)
    native_function("quire_add_low_rank")(
        x.data_ptr(), slots.data_ptr(), ranks.data_ptr(), a.data_ptr(), b.data_ptr(), inner.data_ptr(),
        out.data_ptr(), rows, a.shape[2], num_outputs, width, rank, *bounds, TYPES[x.dtype],
    )  # fmt: skip
