"""Repetition, presence and frequency penalties."""

from collections.abc import Collection

import numpy as np
import torch

from quire.kernels.apply_penalties import apply_penalties
from quire.kernels.transfer import to_device
from quire.messages.plan import NewRow
from quire.messages.sampling_params import SamplingParams
from quire.sample.processors import SampleBatch

FIRST_SLOTS = 4


def penalty_table_bytes(num_rows: int, vocab_size: int) -> int:
    """Peak size of the tables for this many rows: while they grow for the last time, the old ones still exist."""
    slots = FIRST_SLOTS
    while slots < num_rows:
        slots *= 2
    return (slots + slots // 2) * (vocab_size * 5 + 3 * 4)


class Penalties:
    """Token counts for the rows that use penalties, and only for those: a slot has a counter per vocabulary entry.

    Repetition scales logits, by prompt and output; frequency and presence subtract, by the output alone.
    """

    changes_argmax = True

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.slots: dict[int, int] = {}  # row -> slot
        self._free: list[int] = []
        self._in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._strength = torch.zeros(0, 3, device=device)  # repetition, frequency, presence

    @property
    def active(self) -> bool:
        return bool(self.slots)

    @property
    def rows(self) -> Collection[int]:
        return self.slots.keys()

    def add_row(self, new: NewRow) -> None:
        params = new.params
        if not _has_penalties(params):
            return
        if not self._free:
            self._grow()
        slot = self.slots[new.row] = self._free.pop()
        (token_ids,) = to_device(self.device, new.token_ids, dtype=np.int64)
        prompt, output = token_ids[: new.num_prompt_tokens], token_ids[new.num_prompt_tokens :]
        self._in_prompt[slot] = False
        self._in_prompt[slot, prompt] = True
        self._counts[slot] = torch.bincount(output, minlength=self.vocab_size)
        strength = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self._strength[slot] = torch.tensor(strength)

    def remove_row(self, row: int) -> None:
        if row in self.slots:
            self._free.append(self.slots.pop(row))

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        places, slots = self._batch_slots(batch)
        if not len(places):
            return logits
        drafts = _drafts_ahead(places, batch)
        apply_penalties(logits, places, slots, self._in_prompt, self._counts, self._strength, drafts)
        return logits

    def sampled(self, token_ids: torch.Tensor, batch: SampleBatch) -> None:
        places, slots = self._batch_slots(batch)
        if not len(places):
            return
        kept = batch.done[places].int()
        if batch.num_ahead is None:
            self._counts[slots, token_ids[places]] += kept
        else:  # a row may keep a token twice
            self._counts.index_put_((slots, token_ids[places]), kept, accumulate=True)

    def _batch_slots(self, batch: SampleBatch) -> tuple[torch.Tensor, torch.Tensor]:
        places = [i for i, row in enumerate(batch.row_list) if row in self.slots]
        slots = [self.slots[batch.row_list[i]] for i in places]
        on_device = to_device(self.device, places, slots, dtype=np.int64)
        return on_device[0], on_device[1]

    def _grow(self) -> None:
        have = len(self._counts)
        more = max(FIRST_SLOTS, have)
        tables = (self._in_prompt, self._counts, self._strength)
        # Allocate all before keeping any: if memory runs out, no slot may be listed as free that does not exist.
        grown = [table.new_zeros(have + more, table.shape[1]) for table in tables]
        for table, old in zip(grown, tables, strict=True):
            table[:have] = old
        self._in_prompt, self._counts, self._strength = grown
        self._free += range(have, have + more)


def _drafts_ahead(places: torch.Tensor, batch: SampleBatch) -> torch.Tensor | None:
    """[len(places), most drafts] int32: those before each place's token, then -1."""
    if batch.num_ahead is None:
        return None
    count, offset = batch.num_ahead[places].unsqueeze(1), torch.arange(batch.max_ahead, device=places.device)
    at = batch.positions[places].unsqueeze(1) - count + offset
    return torch.where(offset < count, batch.token_ids[batch.rows[places].unsqueeze(1), at], -1)


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
