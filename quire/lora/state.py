"""Which adapter's slot each row of state, and each token of a step, uses."""

from collections.abc import Sequence

import numpy as np
import torch

from quire.kernels.lora import write_slots_of_tokens
from quire.kernels.transfer import to_device
from quire.messages.plan import NewRow

REMOVED = -2  # the slot of a row whose adapter was removed


class LoRAState:
    """Layers hold a reference to it: `slots` is at a fixed address, so that graphs and recorded steps read what the
    step has written there."""

    def __init__(self, max_loras: int, max_rows: int, max_tokens: int, device: torch.device) -> None:
        self.max_loras = max_loras
        self.device = device
        self.active = False  # whether layers add terms; graphs and recordings are made of both
        self.slots = torch.full((max_tokens,), -1, dtype=torch.int32, device=device)  # by token of the step
        self._row_slots = torch.full((max_rows,), -1, dtype=torch.int32, device=device)
        self._of_rows = np.full(max_rows, -1, np.int32)  # the same on the host
        self._slot_of: dict[int, int] = {}  # by lora_id
        self._retired: set[int] = set()  # ids that cached KV blocks may still be found by

    def take_slot(self, lora_id: int) -> int:
        """A free slot for an adapter; ValueError if there is none."""
        if lora_id < 1:
            raise ValueError(f"lora_id is {lora_id}; it must be at least 1 (0 is a request without adapter)")
        if lora_id in self._slot_of:
            raise ValueError(f"adapter {lora_id} is already loaded; remove it first, or load this one by another id")
        if lora_id in self._retired:
            raise ValueError(
                f"lora_id {lora_id} was an adapter that has been removed, and its KV cache may be found by that; load "
                "this one by another id"
            )
        free = set(range(self.max_loras)).difference(self._slot_of.values())
        if not free:
            loaded = sorted(self._slot_of)
            raise ValueError(f"{self.max_loras} adapters are loaded (max_loras): {loaded}; remove one of them first")
        slot = self._slot_of[lora_id] = min(free)
        return slot

    def release_slot(self, lora_id: int) -> None:
        slot = self._slot_of.get(lora_id)
        if slot is None:
            raise ValueError(f"adapter {lora_id} is not loaded; loaded: {sorted(self._slot_of)}")
        del self._slot_of[lora_id]
        self._retired.add(lora_id)
        # Most of these rows have finished, of which only the next plan tells.
        self._of_rows[self._of_rows == slot] = REMOVED

    def update_rows(self, finished: Sequence[int], new_rows: Sequence[NewRow]) -> None:
        """Apply a plan's changes. ValueError if a new row's adapter is not loaded: it has none then."""
        if finished:
            self._of_rows[finished] = -1
        if not new_rows:
            return
        rows = [new.row for new in new_rows]
        slots = [self._slot_of.get(new.lora_id, -1) for new in new_rows]
        self._of_rows[rows] = slots
        rows_, slots_ = to_device(self.device, rows, slots)
        self._row_slots[rows_.long()] = slots_
        missing = {new.lora_id for new in new_rows if new.lora_id} - self._slot_of.keys()
        if missing:
            raise ValueError(f"adapter {min(missing)} is not loaded; loaded: {sorted(self._slot_of)}")

    def needed(self, rows: np.ndarray) -> bool:
        """Whether any of these rows has an adapter. ValueError if one's was removed."""
        slots = self._of_rows[rows]
        if (slots == REMOVED).any():
            raise ValueError("an adapter was removed while requests with it were running")
        return bool((slots >= 0).any())

    def start_step(self, rows: torch.Tensor, token_rows: torch.Tensor | None, active: bool) -> None:
        """Before the layers run: rows and token_rows as prepare_inputs has them."""
        self.active = active
        if active:
            write_slots_of_tokens(self.slots, rows, token_rows, self._row_slots)
