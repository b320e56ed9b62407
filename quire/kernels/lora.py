"""The low-rank terms of adapters: each row's own, added to the outputs of a linear layer."""

from dataclasses import dataclass

import torch

from quire.kernels import native
from quire.kernels.dispatch import use_triton

MAX_PARTS = 3  # query, key and value


@dataclass(frozen=True)
class LowRank:
    """Weights of all slots for one linear layer, whose outputs are one or more parts with factors of their own."""

    a: torch.Tensor  # [slots, parts * rank, in]
    b: torch.Tensor  # [slots, out, rank], scale included; on a CPU a view of [slots, rank, out]
    ends: tuple[int, ...]  # of each part in the outputs
    ranks: torch.Tensor  # [slots] int32: beyond a slot's, both are zero; 0: its adapter leaves this layer as it is

    @property
    def rank(self) -> int:
        return self.b.shape[2]

    @property
    def boundaries(self) -> tuple[int, int]:
        """Where the second and the third part begin; the number of outputs where there is none."""
        first, second, *_ = (*self.ends, self.ends[-1])
        return first, second


def add_low_rank_torch(out: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, w: LowRank) -> None:
    slots = slots[: len(x)]
    for slot in slots[slots >= 0].unique().tolist():
        if not w.ranks[slot]:
            continue
        rows = (slots == slot).nonzero()[:, 0]
        inner = (x[rows].float() @ w.a[slot].float().T).split(w.rank, dim=1)
        factors = w.b[slot].float().tensor_split(w.ends[:-1])
        term = torch.cat([h @ b.T for h, b in zip(inner, factors, strict=True)], dim=1)
        out[rows] = (out[rows].float() + term).to(out.dtype)


def add_low_rank(
    out: torch.Tensor,  # [N, out], contiguous: changed in place
    x: torch.Tensor,  # [N, in]
    slots: torch.Tensor,  # [N or more] int32: each row's; -1 for none, whose outputs are not touched
    w: LowRank,
) -> None:
    """out += B[slot] (A[slot] x), row by row. A row's bits do not depend on the other rows."""
    if use_triton(x):
        from quire.kernels.triton import lora as kernel

        kernel.add_low_rank(out, x, slots, w.ranks, w.a, w.b, w.boundaries)
    elif native.serves(x):
        from quire.kernels.native import lora as native_lora

        native_lora.add_low_rank(out, x, slots, w.ranks, w.a, w.b, w.boundaries)
    else:
        add_low_rank_torch(out, x, slots, w)


def slots_of_tokens_torch(rows: torch.Tensor, token_rows: torch.Tensor | None, row_slots: torch.Tensor) -> torch.Tensor:
    of_token = rows.long()
    if token_rows is not None:
        of_token = torch.where(token_rows < 0, -1, of_token[token_rows.clamp(min=0).long()])
    return torch.where(of_token < 0, -1, row_slots[of_token.clamp(min=0)])


def write_slots_of_tokens(
    out: torch.Tensor,  # [N or more] int32
    rows: torch.Tensor,  # [n]: -1 is padding
    token_rows: torch.Tensor | None,  # [N]: which of the n each token belongs to, -1 is padding; None: token i to row i
    row_slots: torch.Tensor,  # [rows] int32
) -> None:
    """Each token's slot, that of its row; -1 for padding."""
    if use_triton(out):
        from quire.kernels.triton import lora as kernel

        kernel.write_slots_of_tokens(out, rows, token_rows, row_slots)
        return
    found = slots_of_tokens_torch(rows, token_rows, row_slots)
    out[: len(found)] = found
