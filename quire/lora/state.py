"""Which adapter's slot each row of state, and each token of a step, uses."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from quire.kernels.lora import group_tokens, write_slots_of_tokens
from quire.kernels.transfer import to_device
from quire.messages.plan import NewRow

if TYPE_CHECKING:
    from quire.kernels.triton.lora import GroupedTokens


class LoRAState:
    """Layers hold a reference to it: `slots` is at a fixed address, so that graphs and recorded steps read what the
    step has written there."""

    def __init__(self, max_loras: int, max_rows: int, max_tokens: int, device: torch.device) -> None:
        self.max_loras = max_loras
        self.device = device
        self.active = False  # whether layers add terms; graphs and recordings are made of both
        self.slots = torch.full((max_tokens,), -1, dtype=torch.int32, device=device)  # by token of the step
        self.step = torch.zeros(1, dtype=torch.int32, device=device)  # of those with adapters, since graphs were made
        self.grouped: GroupedTokens | None = None  # the step's tokens by adapter, where kernels want it
        self.head_takes_adapters = False
        self.logit_slots: torch.Tensor | None = None  # by row of the logits that are being computed
        self.logits_grouped: GroupedTokens | None = None
        self._row_slots = torch.full((max_rows,), -1, dtype=torch.int32, device=device)
        self._of_rows = np.full(max_rows, -1, np.int32)  # the same on the host
        self._slot_of: dict[int, int] = {}  # by lora_id

    def take_slot(self, slot: int, lora_id: int) -> None:
        """The slot is this adapter's from now on. The core sees to it that no row uses the one before any more."""
        self._slot_of = {other: at for other, at in self._slot_of.items() if at != slot and other != lora_id}
        self._slot_of[lora_id] = slot

    def free_slot(self, slot: int) -> None:
        self._slot_of = {lora_id: at for lora_id, at in self._slot_of.items() if at != slot}

    def update_rows(self, finished: Sequence[int], new_rows: Sequence[NewRow]) -> None:
        """Apply a plan's changes. Until the step starts no layer adds terms: encoders have rows of their own."""
        self.active = False
        if finished:
            self._of_rows[finished] = -1
        if not new_rows:
            return
        rows = [new.row for new in new_rows]
        slots = [self._slot_of[new.lora_id] if new.lora_id else -1 for new in new_rows]
        self._of_rows[rows] = slots
        rows_, slots_ = to_device(self.device, rows, slots)
        self._row_slots[rows_.long()] = slots_

    def needed(self, rows: np.ndarray) -> bool:
        """Whether any of these rows has an adapter."""
        return bool((self._of_rows[rows] >= 0).any())

    @contextmanager
    def logits_of(self, tokens: torch.Tensor | slice) -> Iterator[None]:
        """Inside, a head that takes adapters adds the terms of these tokens of the step."""
        if self.active and self.head_takes_adapters:
            self.logit_slots = self.slots[tokens]
            self.logits_grouped = self.grouped if isinstance(tokens, slice) and tokens == slice(None) else None
        try:
            yield
        finally:
            self.logit_slots = self.logits_grouped = None

    def start_step(self, rows: torch.Tensor, token_rows: torch.Tensor | None, active: bool) -> None:
        """Before the layers run: rows and token_rows as prepare_inputs has them."""
        self.active = active
        if active:
            write_slots_of_tokens(self.slots, rows, token_rows, self._row_slots, self.step)
            count = len(rows if token_rows is None else token_rows)
            self.grouped = group_tokens(self.slots[:count], self.max_loras)
