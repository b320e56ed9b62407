"""Logprobs of prompt tokens, for requests that ask for them, chunk by chunk as the prompt is computed."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from quire.kernels.transfer import to_device
from quire.messages.plan import NewRow, SchedulerOutput
from quire.messages.requests import PromptLogprobs
from quire.sample.logprobs import PROMPT_SLICE, TokenLogprobs, token_logprobs


@dataclass(slots=True)
class PromptProgress:
    num_logprobs: int
    token_ids: np.ndarray  # the prompt
    next_position: int  # counted by the host: a prompt advances as planned, whatever the device samples


class PromptLogprobsTracker:
    def __init__(self, compute_logits: Callable[[torch.Tensor], torch.Tensor], logprobs_mode: str) -> None:
        self.compute_logits = compute_logits
        self.as_logits = logprobs_mode.endswith("logits")
        self._rows: dict[int, PromptProgress] = {}

    def needed(self, plan: SchedulerOutput) -> bool:
        """Whether the plan computes part of a prompt whose logprobs were requested."""
        if not self._rows:
            return False
        prompts = (self._rows.get(row) for row in plan.rows.tolist())
        return any(prompt is not None and prompt.next_position < len(prompt.token_ids) - 1 for prompt in prompts)

    def add_row(self, new: NewRow) -> None:
        count = new.params.prompt_logprobs
        if count is not None:
            self._rows[new.row] = PromptProgress(count, new.token_ids[: new.num_prompt_tokens], new.num_computed)

    def remove_row(self, row: int) -> None:
        self._rows.pop(row, None)

    def compute(self, plan: SchedulerOutput, hidden: torch.Tensor) -> list[PromptLogprobs]:
        """hidden [N, hidden]: position p of a row gives the logprobs of its token p + 1."""
        if not self._rows:
            return []
        results = []
        first = 0
        for place, (row, num_new) in enumerate(zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True)):
            prompt = self._rows.get(row)
            if prompt is not None:
                start = prompt.next_position
                prompt.next_position += num_new
                stop = min(prompt.next_position, len(prompt.token_ids) - 1)
                for at in range(start, stop, PROMPT_SLICE):
                    size = min(PROMPT_SLICE, stop - at)
                    part = hidden[first + at - start : first + at - start + size]
                    (targets,) = to_device(hidden.device, prompt.token_ids[at + 1 : at + 1 + size], dtype=np.int64)
                    logits = self.compute_logits(part)
                    found = token_logprobs(logits, targets, prompt.num_logprobs, self.as_logits)
                    results.append(_to_host(found, place, at + 1))
            first += num_new
        return results


def _to_host(found: TokenLogprobs, place: int, start: int) -> PromptLogprobs:
    return PromptLogprobs(
        place,
        start,
        found.token_ids.cpu().numpy(),
        found.logprobs.cpu().numpy(),
        found.ranks.cpu().numpy(),
    )
