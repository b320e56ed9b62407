"""Logits processors: batch-level objects that change logits before a token is drawn.

Each keeps its parameters by row, in place, so a step only gathers them. Built-in ones and users' own have the same
interface.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from quire.messages.plan import NewRow

if TYPE_CHECKING:
    import torch

    from quire.kernels.accept_sampled import DrawnDrafts


@dataclass(slots=True)
class SampleBatch:
    """The rows of a step, in the order of the logits."""

    rows: "torch.Tensor"  # [n] int64
    row_list: list[int]
    positions: "torch.Tensor"  # [n] int64: index in its request of the token to be drawn
    done: "torch.Tensor"  # [n] bool: rows that keep the sampled token; the others are in the middle of their prompt
    token_ids: "torch.Tensor"  # [rows, max_model_len] int32: the tokens of every row so far, and drafts behind them
    num_ahead: "torch.Tensor | None" = None  # [n] int64: drafts among the tokens before; None: no row verifies any
    max_ahead: int = 0  # at least the largest of them
    drafts: "DrawnDrafts | None" = None  # that were drawn; None: they are single guesses


class LogitsProcessor(Protocol):
    changes_argmax: bool  # whether greedy rows need it

    def add_row(self, new: NewRow) -> None:
        """A request gets a row, for the first time or again after preemption."""
        ...

    def remove_row(self, row: int) -> None: ...

    @property
    def active(self) -> bool:
        """Whether any row uses it."""
        ...

    def apply(self, logits: "torch.Tensor", batch: SampleBatch) -> "torch.Tensor":
        """[n, vocab] float32 in and out; may work in place."""
        ...

    def sampled(self, token_ids: "torch.Tensor", batch: SampleBatch) -> None:
        """[n] sampled tokens; only those of `batch.done` rows are kept. A row that verified drafts may keep several."""
        ...


class ByRow:
    """Base of processors that keep parameters by row and do not depend on sampled tokens."""

    changes_argmax = True

    def __init__(self, device: "torch.device") -> None:
        self.device = device
        self.rows: dict[int, object] = {}

    def remove_row(self, row: int) -> None:
        self.rows.pop(row, None)

    @property
    def active(self) -> bool:
        return bool(self.rows)

    def sampled(self, token_ids: "torch.Tensor", batch: SampleBatch) -> None: ...

    def places(self, batch: SampleBatch) -> list[int]:
        """Indices in the batch of the rows that use this processor."""
        return [i for i, row in enumerate(batch.row_list) if row in self.rows]
