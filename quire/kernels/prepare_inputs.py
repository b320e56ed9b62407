"""A step's model inputs, computed on the device from the rows' own state."""

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class PreparedInputs:
    """n rows, N tokens in all."""

    input_ids: torch.Tensor  # [N] int64
    positions: torch.Tensor  # [N] int64
    slot_mapping: list[torch.Tensor]  # per group, [N] int64
    query_start: torch.Tensor  # [n + 1] int32
    seq_lens: torch.Tensor  # [n] int32
    last_token: torch.Tensor  # [n] int64: where each row's last token stands among the N


def prepare_inputs(
    rows: torch.Tensor,  # [n] int64
    num_new: torch.Tensor,  # [n] int64: tokens each row advances
    total: int,  # N, known to the host
    token_ids: torch.Tensor,  # [rows, max_model_len] int32
    num_computed: torch.Tensor,  # [rows] int64
    block_tables: list[torch.Tensor],  # per group, [rows, max_blocks] int32
    block_sizes: list[int],
) -> PreparedInputs:
    computed = num_computed[rows]
    ends = torch.cumsum(num_new, 0)
    if total == len(rows):  # one token each: nothing to expand
        row_of_token, positions = rows, computed
    else:
        of_token = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), num_new, output_size=total)
        row_of_token = rows[of_token]
        offset = torch.arange(total, device=rows.device) - (ends - num_new)[of_token]
        positions = computed[of_token] + offset
    query_start = torch.zeros(len(rows) + 1, dtype=torch.int32, device=rows.device)
    query_start[1:] = ends
    slots = [
        table[row_of_token, positions // size].long() * size + positions % size
        for table, size in zip(block_tables, block_sizes, strict=True)
    ]
    return PreparedInputs(
        input_ids=token_ids[row_of_token, positions].long(),
        positions=positions,
        slot_mapping=slots,
        query_start=query_start,
        seq_lens=(computed + num_new).int(),
        last_token=ends - 1,
    )
