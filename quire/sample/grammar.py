"""Grammar masks, which come with each step, not with a row."""

import numpy as np
import torch

from quire.kernels.apply_bitmask import apply_bitmask
from quire.kernels.transfer import to_device
from quire.messages.plan import GrammarMask, NewRow
from quire.sample.processors import SampleBatch


class Grammar:
    """Only tokens that a row's grammar allows may be drawn."""

    changes_argmax = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.mask: GrammarMask | None = None  # of the step that is being sampled
        self.rows: set[int] = set()  # with a grammar

    def add_row(self, new: NewRow) -> None:
        if new.params.structured_outputs is not None:
            self.rows.add(new.row)

    def remove_row(self, row: int) -> None:
        self.rows.discard(row)

    @property
    def active(self) -> bool:
        return self.mask is not None

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        assert self.mask is not None
        (bitmask,) = to_device(self.device, self.mask.bitmask)
        (places,) = to_device(self.device, self.mask.places, dtype=np.int64)
        apply_bitmask(logits, bitmask.view(self.mask.bitmask.shape), places)
        return logits

    def sampled(self, token_ids: torch.Tensor, batch: SampleBatch) -> None: ...
