"""Which rows compute how many tokens in a forward pass, as kernels need it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quire.attention.base import ForwardContext, StepInputs
from quire.attention.group_backends import GroupBackends
from quire.kernels.prepare_inputs import PreparedInputs
from quire.kernels.transfer import to_device


@dataclass(slots=True)
class StepBatch:
    """n rows, N tokens in all, on the device."""

    rows: torch.Tensor  # [n], -1 for padding
    query_start: torch.Tensor  # [n + 1] int32: where each row's tokens begin
    token_rows: torch.Tensor | None = None  # [N] int32: which of the n each token belongs to; None: one token each
    query_blocks: Sequence[torch.Tensor | None] | None = None  # by distinct backend
    has_decode_rows: bool = True
    attend_as_rows: bool = False  # every token by itself

    @classmethod
    def planned(
        cls,
        rows: np.ndarray,
        num_tokens: np.ndarray,
        backends: GroupBackends,
        device: torch.device,
        more: Sequence[np.ndarray | Sequence[int]] = (),
    ) -> tuple["StepBatch", list[torch.Tensor]]:
        """Any numbers of tokens; `more` is copied to the device with them."""
        query_start = first_tokens(num_tokens)
        token_rows = np.repeat(np.arange(len(rows), dtype=np.int32), num_tokens)
        blocks = backends.plan_queries(num_tokens)
        arrays = [rows, query_start, token_rows, *more, *(part for part in blocks if part is not None)]
        rows_, query_start_, token_rows_, *rest = to_device(device, *arrays)
        copied = iter(rest[len(more) :])
        on_device = [None if part is None else next(copied).view(-1, 2) for part in blocks]
        batch = cls(
            rows_,
            query_start_,
            None if len(rows) == len(token_rows) else token_rows_,
            on_device if len(rest) > len(more) else None,
            has_decode_rows=bool((num_tokens == 1).any()),
        )
        return batch, rest[: len(more)]

    @classmethod
    def of_equal(cls, rows: torch.Tensor, tokens_per_row: int, query_start: torch.Tensor | None = None) -> "StepBatch":
        """As many tokens in every row, without the host. More than one: each is a row of the attention's, with its own
        length, so that it goes through the kernel that splits keys. `query_start`: if there is one at hand."""
        count, device = len(rows), rows.device
        if tokens_per_row == 1 and query_start is not None:
            return cls(rows, query_start)
        query_start = torch.arange(count + 1, dtype=torch.int32, device=device) * tokens_per_row
        if tokens_per_row == 1:
            return cls(rows, query_start)
        tokens = torch.arange(count * tokens_per_row, dtype=torch.int32, device=device)
        return cls(rows, query_start, tokens // tokens_per_row, attend_as_rows=True)

    @classmethod
    def padding(cls, num_rows: int, num_tokens: int, backends: GroupBackends, device: torch.device) -> "StepBatch":
        """Rows of one token, but for the last, that are all padding."""
        query_start = np.minimum(np.arange(num_rows + 1), num_rows - 1)
        query_start[-1] = num_tokens
        arrays = (np.full(num_rows, -1), query_start, np.zeros(num_tokens), [-1, -1])
        rows, query_start_, token_rows, blocks = to_device(device, *arrays)
        return cls(rows, query_start_, token_rows, [blocks.view(-1, 2)] * len(backends.distinct))

    def context(
        self,
        inputs: PreparedInputs,
        indices: torch.Tensor,  # [N]: of the tokens in their rows
        backends: GroupBackends,
        tables: Sequence[torch.Tensor],
        sizes: Sequence[int],
        prefix_len: torch.Tensor | None = None,
    ) -> ForwardContext:
        """What layers need beside ids and positions."""
        rows, seq_lens, decode_only = self.rows, inputs.seq_lens, self.token_rows is None
        if self.attend_as_rows:
            assert self.token_rows is not None
            rows, decode_only = rows[self.token_rows.long()], True
            seq_lens = torch.where(rows >= 0, indices.int() + 1, 0)
        step = StepInputs(
            rows=rows,
            num_tokens=len(inputs.input_ids),
            query_start=self.query_start,
            seq_lens=seq_lens,
            decode_only=decode_only,
            has_decode_rows=self.has_decode_rows,
            prefix_len=prefix_len,
        )
        return ForwardContext(step, backends.build(step, tables, sizes, self.query_blocks), inputs.slot_mapping)

    def context_of_last(
        self,
        inputs: PreparedInputs,
        group: int,  # of the layer's cache
        backends: GroupBackends,
        tables: Sequence[torch.Tensor],
        sizes: Sequence[int],
    ) -> ForwardContext:
        """For one layer and each row's last token alone. It has no slots: their keys and values are written already."""
        starts = torch.arange(len(self.rows) + 1, dtype=torch.int32, device=self.rows.device)
        step = StepInputs(self.rows, len(self.rows), starts, inputs.seq_lens, decode_only=True)
        metadata: list[Any] = [None] * len(tables)
        metadata[group] = backends.by_group[group].build(step, tables[group], sizes[group])
        return ForwardContext(step, metadata, [])


def first_tokens(num_tokens: np.ndarray) -> np.ndarray:
    """[n + 1] int32: where each row's tokens begin, and where the last one's end."""
    starts = np.zeros(len(num_tokens) + 1, np.int32)
    np.cumsum(num_tokens, out=starts[1:])
    return starts
