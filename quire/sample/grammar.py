"""Grammars' masks, which come with the step and not with the row."""

import numpy as np
import torch

from quire.kernels.apply_bitmask import apply_bitmask
from quire.messages.plan import GrammarMask, NewRow
from quire.sample.processors import SampleBatch


class Grammar:
    """Only tokens that a row's grammar allows may be drawn."""

    changes_argmax = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.mask: GrammarMask | None = None  # of the step that is being sampled

    def add_row(self, new: NewRow) -> None: ...

    def remove_row(self, row: int) -> None: ...

    @property
    def active(self) -> bool:
        return self.mask is not None

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        assert self.mask is not None
        apply_bitmask(logits, self._upload(self.mask.bitmask), self._upload(self.mask.places))
        return logits

    def sampled(self, token_ids: torch.Tensor, batch: SampleBatch) -> None: ...

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        host = torch.as_tensor(array)
        if self.device.type != "cuda":
            return host
        return host.pin_memory().to(self.device, non_blocking=True)
