"""A step's model inputs, computed on the device from the rows' state, whose num_computed advances."""

from dataclasses import dataclass

import torch

from quire.kernels.dispatch import use_triton
from quire.kernels.native import library
from quire.kernels.native.inputs import prepare_inputs_native


@dataclass(slots=True)
class PreparedInputs:
    """n rows, N tokens in all. Row -1 is padding: token 0 at position 0, written to the null block."""

    input_ids: torch.Tensor  # [N]
    positions: torch.Tensor  # [N]
    slot_mapping: list[torch.Tensor]  # per group, [N]: block * block_size + offset
    seq_lens: torch.Tensor  # [n] int32: 0 for padding


def prepare_inputs_torch(
    rows: torch.Tensor,  # [n]
    query_start: torch.Tensor,  # [n + 1]: where each row's tokens begin
    token_rows: torch.Tensor | None,  # [N]: which of the n each token belongs to; None: token i to row i
    token_ids: torch.Tensor,  # [rows, max_model_len] int32
    num_computed: torch.Tensor,  # [rows] int64: advanced
    block_tables: list[torch.Tensor],  # per group, [rows, max_blocks] int32
    block_sizes: list[int],
) -> PreparedInputs:
    rows = rows.long()
    computed = num_computed[rows]
    num_new = query_start.diff()
    if token_rows is None:
        row_of_token, positions = rows, computed
    else:
        of_token = token_rows.long()
        row_of_token = rows[of_token]
        offset = torch.arange(len(of_token), device=rows.device) - query_start[of_token]
        positions = computed[of_token] + offset
    slots = [
        table[row_of_token, positions // size].long() * size + positions % size
        for table, size in zip(block_tables, block_sizes, strict=True)
    ]
    seq_lens = computed + num_new
    num_computed[rows] = seq_lens
    return PreparedInputs(token_ids[row_of_token, positions].long(), positions, slots, seq_lens.int())


def prepare_inputs(
    rows: torch.Tensor,
    query_start: torch.Tensor,
    token_rows: torch.Tensor | None,
    token_ids: torch.Tensor,
    num_computed: torch.Tensor,
    block_tables: list[torch.Tensor],
    block_sizes: list[int],
) -> PreparedInputs:
    state = (token_ids, num_computed, block_tables, block_sizes)
    if use_triton(token_ids):
        from quire.kernels.triton import prepare_inputs as kernel

        return PreparedInputs(*kernel.prepare_inputs(rows, query_start, token_rows, *state))
    if token_ids.device.type == "cpu" and library() is not None:
        return PreparedInputs(*prepare_inputs_native(rows, query_start, token_rows, *state))
    return prepare_inputs_torch(rows, query_start, token_rows, *state)
