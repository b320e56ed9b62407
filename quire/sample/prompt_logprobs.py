"""Logprobs of prompt tokens, for requests that ask for them, chunk by chunk as the prompt is computed."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from quire.kernels.transfer import to_device
from quire.messages.plan import NewRow, SchedulerOutput
from quire.messages.requests import PromptLogprobs
from quire.sample.logprobs import PROMPT_SLICE, TokenLogprobs, candidate_logprobs, token_logprobs


@dataclass(slots=True)
class PromptProgress:
    num_logprobs: int | None  # None: only candidates are scored
    token_ids: np.ndarray  # the prompt
    candidates: np.ndarray | None  # [positions, k] token ids to score; -1: none
    first_scored: int  # the position of the first
    next_position: int  # counted by the host: a prompt advances as planned, whatever the device samples


class PromptLogprobsTracker:
    def __init__(
        self, compute_logits: Callable[[torch.Tensor, slice], torch.Tensor], logprobs_mode: str, answers: bool = True
    ) -> None:
        """`compute_logits`: of some tokens of a step's hidden states. A rank that does not answer takes part in that,
        and makes nothing of them."""
        self.compute_logits, self.answers = compute_logits, answers
        self.as_logits = logprobs_mode.endswith("logits")
        self._rows: dict[int, PromptProgress] = {}

    def needed(self, plan: SchedulerOutput) -> bool:
        """Whether the plan computes part of a prompt whose logprobs were requested."""
        if not self._rows:
            return False
        prompts = (self._rows.get(row) for row in plan.rows.tolist())
        return any(prompt is not None and prompt.next_position < len(prompt.token_ids) - 1 for prompt in prompts)

    def add_row(self, new: NewRow) -> None:
        params = new.params
        if params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None:
            prompt, scored = new.token_ids[: new.num_prompt_tokens], _padded(params.prompt_logprob_token_ids)
            start = params.prompt_logprob_start or 0
            self._rows[new.row] = PromptProgress(params.prompt_logprobs, prompt, scored, start, new.num_computed)

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
                begin = start if prompt.num_logprobs is not None else max(start, prompt.first_scored)
                for at in range(begin, stop, PROMPT_SLICE):
                    size = min(PROMPT_SLICE, stop - at)
                    place_of = first + at - start
                    logits = self.compute_logits(hidden, slice(place_of, place_of + size))
                    results += self._slice(prompt, place, at, logits) if self.answers else []
            first += num_new
        return results

    def _slice(self, prompt: PromptProgress, place: int, at: int, logits: torch.Tensor) -> list[PromptLogprobs]:
        """logits [m, vocab] of positions at, at + 1, ..."""
        results, end = [], at + len(logits)
        if prompt.num_logprobs is not None:
            (targets,) = to_device(logits.device, prompt.token_ids[at + 1 : end + 1], dtype=np.int64)
            results.append(
                _to_host(token_logprobs(logits, targets, prompt.num_logprobs, self.as_logits), place, at + 1)
            )
        if prompt.candidates is not None and end > prompt.first_scored:
            low = max(at, prompt.first_scored)
            ids = prompt.candidates[low - prompt.first_scored : end - prompt.first_scored]
            scores = candidate_logprobs(logits[low - at :], torch.from_numpy(ids).to(logits.device), self.as_logits)
            no_ranks = np.empty(0, np.int64)
            results.append(PromptLogprobs(place, low + 1, ids, scores.cpu().numpy(), no_ranks, candidates=True))
        return results


def _padded(rows: list[list[int]] | None) -> np.ndarray | None:
    """[rows, longest], shorter ones filled up with -1."""
    if rows is None:
        return None
    table = np.full((len(rows), max(map(len, rows))), -1, np.int64)
    for row, ids in zip(table, rows, strict=True):
        row[: len(ids)] = ids
    return table


def _to_host(found: TokenLogprobs, place: int, start: int) -> PromptLogprobs:
    return PromptLogprobs(
        place,
        start,
        found.token_ids.cpu().numpy(),
        found.logprobs.cpu().numpy(),
        found.ranks.cpu().numpy(),
    )
