"""Logprobs of the prompt's own tokens, for requests that ask, as their prompt is computed piece by piece."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from quire.kernels.transfer import to_device
from quire.messages.plan import NewRow, SchedulerOutput
from quire.messages.requests import PromptLogprobs
from quire.sample.logprobs import PROMPT_SLICE, TokenLogprobs, token_logprobs


@dataclass(slots=True)
class PromptRow:
    count: int  # logprobs asked for
    token_ids: np.ndarray  # the prompt
    next_position: int  # the host's own count: a prompt's progress needs no news from the device


class PromptScores:
    def __init__(self, compute_logits: Callable[[torch.Tensor], torch.Tensor], logprobs_mode: str) -> None:
        self.compute_logits = compute_logits
        self.as_logits = logprobs_mode.endswith("logits")
        self._rows: dict[int, PromptRow] = {}

    def wanted(self, plan: SchedulerOutput) -> bool:
        """Whether one of the plan's rows has a part of its prompt to score."""
        if not self._rows:
            return False
        asked = (self._rows.get(row) for row in plan.rows.tolist())
        return any(row is not None and row.next_position < len(row.token_ids) - 1 for row in asked)

    def add_row(self, new: NewRow) -> None:
        count = new.params.prompt_logprobs
        if count is not None:
            self._rows[new.row] = PromptRow(count, new.token_ids[: new.num_prompt_tokens], new.num_computed)

    def remove_row(self, row: int) -> None:
        self._rows.pop(row, None)

    def score(self, plan: SchedulerOutput, hidden: torch.Tensor) -> list[PromptLogprobs]:
        """hidden [N, hidden]: position p of a row scores its token p + 1."""
        if not self._rows:
            return []
        found = []
        first = 0
        for place, (row, num_new) in enumerate(zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True)):
            asked = self._rows.get(row)
            if asked is not None:
                start = asked.next_position
                asked.next_position += num_new
                stop = min(asked.next_position, len(asked.token_ids) - 1)
                for at in range(start, stop, PROMPT_SLICE):
                    size = min(PROMPT_SLICE, stop - at)
                    part = hidden[first + at - start : first + at - start + size]
                    (targets,) = to_device(hidden.device, asked.token_ids[at + 1 : at + 1 + size], dtype=np.int64)
                    scores = token_logprobs(self.compute_logits(part), targets, asked.count, self.as_logits)
                    found.append(_to_host(scores, place, at + 1))
            first += num_new
        return found


def _to_host(scores: TokenLogprobs, place: int, start: int) -> PromptLogprobs:
    return PromptLogprobs(
        place,
        start,
        scores.token_ids.cpu().numpy(),
        scores.logprobs.cpu().numpy(),
        scores.ranks.cpu().numpy(),
    )
