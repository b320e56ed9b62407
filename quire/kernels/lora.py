"""The low-rank terms of adapters: each row's own, added to the outputs of a linear layer."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

import torch

from quire.kernels import native
from quire.kernels.dispatch import INTERPRETED, supports_triton, use_triton

if TYPE_CHECKING:
    from quire.kernels.triton.lora import GroupedTokens

MAX_PARTS = 3  # query, key and value


@dataclass(frozen=True)
class LowRank:
    """Weights of all slots for one linear layer, whose outputs are one or more parts with factors of their own."""

    a: torch.Tensor  # [slots, parts * rank, in]
    b: torch.Tensor  # [slots, out, rank], scale included; on a CPU a view of [slots, rank, out]
    ends: tuple[int, ...]  # of each part in the outputs
    ranks: torch.Tensor  # [slots] int32: beyond a slot's, both are zero; 0: its adapter leaves this layer as it is
    # What programs of one launch leave for the others, of `row_words`: a layer's own, since each value is marked with
    # the step.
    inner: torch.Tensor | None = None  # [rows, splits, parts * rank]
    terms: torch.Tensor | None = None  # [rows, out]

    @property
    def rank(self) -> int:
        return self.b.shape[2]

    @property
    def boundaries(self) -> tuple[int, int]:
        """Where the second and the third part begin; the number of outputs where there is none."""
        first, second, *_ = (*self.ends, self.ends[-1])
        return first, second


@dataclass(frozen=True)
class RowTerms:
    """The terms of a few rows, which the base's kernel computes and adds (`skinny_linear`)."""

    slots: torch.Tensor  # [rows or more] int32
    step: torch.Tensor  # [1] int32: another one whenever a layer is launched again
    w: LowRank


def row_words(
    rows: int, num_inputs: int, width: int, num_outputs: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """LowRank's `inner` and `terms`, for devices that need them."""
    if not (supports_triton(device) or INTERPRETED):
        return None, None
    from quire.kernels.triton.lora import row_splits

    inner = torch.zeros(rows, row_splits(num_inputs)[0], width, dtype=torch.int64, device=device)
    return inner, torch.zeros(rows, num_outputs, dtype=torch.int64, device=device)


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
    grouped: Optional["GroupedTokens"] = None,  # the slots' `group_tokens`, if there are already
) -> None:
    """out += B[slot] (A[slot] x), row by row. A row's bits do not depend on the other rows; on a GPU they do on which
    range of TILINGS (kernels/triton/lora.py) has their number."""
    if use_triton(x):
        from quire.kernels.triton import lora as kernel

        if grouped is None:
            grouped = kernel.group_tokens(slots[: len(x)], len(w.a))
        kernel.add_low_rank(out, x, grouped, w.ranks, w.a, w.b, w.boundaries)
    elif native.serves(x):
        from quire.kernels.native import lora as native_lora

        native_lora.add_low_rank(out, x, slots, w.ranks, w.a, w.b, w.boundaries)
    else:
        add_low_rank_torch(out, x, slots, w)


def can_gate(x: torch.Tensor, w: LowRank) -> bool:
    """Whether `gated_low_rank` is faster than `add_low_rank` and an activation after it."""
    if not use_triton(x):
        return False
    from quire.kernels.triton.lora import RANKS

    return w.rank <= RANKS


def gated_low_rank(
    gate_up: torch.Tensor,  # [N, 2 * I]: the base's outputs, gate before up
    x: torch.Tensor,
    w: LowRank,
    grouped: "GroupedTokens",
) -> torch.Tensor:
    """silu(gate) * up, [N, I], with the terms of both. The same bits as by `add_low_rank` and silu_mul."""
    from quire.kernels.triton import lora as kernel

    return kernel.gated_low_rank(gate_up, x, grouped, w.ranks, w.a, w.b)


def sums_of_terms_torch(terms: RowTerms, x: torch.Tensor) -> torch.Tensor:
    """[rows, outputs] float32, of x [rows, inputs] in float32."""
    w = terms.w
    sums = torch.zeros(len(x), w.b.shape[1], device=w.b.device)
    for row, slot in enumerate(terms.slots[: len(x)].tolist()):
        if slot >= 0 and w.ranks[slot]:
            inner = (w.a[slot].float() @ x[row]).split(w.rank)
            factors = w.b[slot].float().tensor_split(w.ends[:-1])
            sums[row] = torch.cat([b @ h for h, b in zip(inner, factors, strict=True)])
    return sums


def group_tokens(slots: torch.Tensor, num_slots: int) -> Optional["GroupedTokens"]:
    """Once for all layers of a step, for kernels that want it."""
    if not use_triton(slots):
        return None
    from quire.kernels.triton import lora as kernel

    return kernel.group_tokens(slots, num_slots)


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
    step: torch.Tensor,  # [1] int32: counted here, for RowTerms
) -> None:
    """Each token's slot, that of its row; -1 for padding."""
    if use_triton(out):
        from quire.kernels.triton import lora as kernel

        kernel.write_slots_of_tokens(out, rows, token_rows, row_slots, step)
        return
    step += 1
    found = slots_of_tokens_torch(rows, token_rows, row_slots)
    out[: len(found)] = found
