"""A step's model inputs in one call of C: see kernels/prepare_inputs.py."""

import ctypes

import torch

from quire.kernels.native import native_function


def prepare_inputs_native(
    rows: torch.Tensor,
    query_start: torch.Tensor,
    token_rows: torch.Tensor | None,
    token_ids: torch.Tensor,
    num_computed: torch.Tensor,
    block_tables: list[torch.Tensor],
    block_sizes: list[int],
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Token ids, positions, slots by group, and lengths of rows."""
    tokens, (num_rows, length) = len(rows if token_rows is None else token_rows), token_ids.shape
    assert token_ids.stride(1) == 1 and num_computed.is_contiguous() and len(query_start) == len(rows) + 1
    rows, query_start = rows.to(torch.int32).contiguous(), query_start.to(torch.int32).contiguous()
    assert token_ids.dtype is torch.int32 and num_computed.dtype is torch.int64
    numbers: list[int] = []
    for table, size in zip(block_tables, block_sizes, strict=True):
        assert table.dtype is torch.int32 and table.stride(1) == 1
        numbers += (table.data_ptr(), table.stride(0), size)
    tables = (ctypes.c_int64 * len(numbers))(*numbers)
    ids, positions, *slots = torch.empty(2 + len(block_tables), tokens, dtype=torch.int64)
    seq_lens = torch.empty(len(rows), dtype=torch.int32)
    native_function("quire_prepare_inputs")(
        rows.data_ptr(), query_start.data_ptr(), token_ids.data_ptr(), num_computed.data_ptr(), tables,
        ids.data_ptr(), positions.data_ptr(), slots[0].data_ptr() if slots else None, seq_lens.data_ptr(),
        len(block_tables), len(rows), tokens, num_rows, length, token_ids.stride(0),
    )  # fmt: skip
    return ids, positions, slots, seq_lens
