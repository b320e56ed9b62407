"""Sampling where several ranks share every layer: one draws, and the others take over what it drew."""

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from quire.distributed.group import Group
from quire.kernels.accept_sampled import DrawnDrafts
from quire.kernels.append_drafts import append_drafts
from quire.kernels.sample_tokens import Draw, TokenRows
from quire.messages.plan import GrammarMask, NewRow
from quire.sample.processors import LogitsProcessor, SampleBatch
from quire.sample.sampler import Sampled, Sampler

FAILED = -2  # instead of the tokens of a step that failed on the rank that samples


class LeadingSampler(Sampler):
    """Draws, and broadcasts the tokens on the device: [n] int32 a step, one for every position that was drawn at."""

    def __init__(
        self,
        group: Group,
        num_rows: int,
        vocab_size: int,
        device: torch.device,
        logprobs_mode: str,
        processors: Sequence[LogitsProcessor],
    ) -> None:
        super().__init__(num_rows, vocab_size, device, logprobs_mode, processors)
        self._group = group
        # Mostly of a user's logits processor. All ranks run the step to its end, and fail when its tokens are read.
        self._error: Exception | None = None  # of the step that is being sampled
        self._errors: deque[Exception] = deque()  # of steps whose tokens are FAILED

    def add_row(self, new: NewRow) -> None:
        try:
            super().add_row(new)
        except Exception as error:
            self._error = error

    def choose_draw(self, row_list: list[int], grammar: GrammarMask | None = None) -> Draw | None:
        return super().choose_draw(row_list, grammar) if self._error is None else None

    def sample_fused(
        self, logits: torch.Tensor, rows: torch.Tensor, state: TokenRows, draw: Draw, out: torch.Tensor
    ) -> None:
        super().sample_fused(logits, rows, state, draw, out)
        self._group.broadcast(out)

    def draw_fused(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        draw: Draw,
        drafts: DrawnDrafts | None = None,
    ) -> torch.Tensor:
        tokens = super().draw_fused(logits, rows, positions, draw, drafts)
        self._group.broadcast(tokens.int())
        return tokens

    def sample(self, logits: torch.Tensor, batch: SampleBatch, grammar: GrammarMask | None = None) -> Sampled:
        sampled = Sampled(torch.full_like(batch.rows, FAILED), [], None)
        error, self._error = self._error, None
        if error is None:
            try:
                sampled = super().sample(logits, batch, grammar)
            except Exception as raised:
                error = raised
        if error is not None:
            self._errors.append(error)
        self._group.broadcast(sampled.token_ids.int())
        return sampled

    def check(self, token_ids: np.ndarray) -> None:
        if (token_ids[:, :1] == FAILED).any():  # what lies behind may be anything
            raise self._errors.popleft()


class FollowingSampler(Sampler):
    """Receives tokens instead of drawing. It keeps the rows' parameters, by which proposers may draw drafts."""

    def __init__(self, group: Group, num_rows: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(num_rows, vocab_size, device)
        self._group = group

    def add_row(self, new: NewRow) -> None:
        self.parameters.set(new.row, new.params, new.seed)

    def remove_row(self, row: int) -> None: ...

    def choose_draw(self, row_list: list[int], grammar: GrammarMask | None = None) -> Draw | None:
        self.parameters.upload()
        return Draw.GREEDY  # whatever the leading rank needs, fused kernels append what it sends

    def sample_fused(
        self, logits: torch.Tensor, rows: torch.Tensor, state: TokenRows, draw: Draw, out: torch.Tensor
    ) -> None:
        append_drafts(self._group.broadcast(out), rows[: len(out)], state)

    def draw_fused(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        draw: Draw,
        drafts: DrawnDrafts | None = None,
    ) -> torch.Tensor:
        return self._group.broadcast(torch.empty_like(rows, dtype=torch.int32)).long()

    def sample(self, logits: torch.Tensor, batch: SampleBatch, grammar: GrammarMask | None = None) -> Sampled:
        self.parameters.upload()
        tokens = self._group.broadcast(torch.empty_like(batch.rows, dtype=torch.int32))
        return Sampled(tokens.long(), [], None)

    def check(self, token_ids: np.ndarray) -> None:
        if (token_ids[:, :1] == FAILED).any():  # what lies behind may be anything
            raise RuntimeError("the rank that samples failed in this step")


def make_sampler(
    group: Group,
    num_rows: int,
    vocab_size: int,
    device: torch.device,
    logprobs_mode: str,
    processors: Sequence[LogitsProcessor],
) -> Sampler:
    """That of a rank of `group`, whose first one draws. `processors` are users' own."""
    if group.rank > 0:
        return FollowingSampler(group, num_rows, vocab_size, device)
    wanted = (num_rows, vocab_size, device, logprobs_mode, processors)
    return Sampler(*wanted) if group.size == 1 else LeadingSampler(group, *wanted)
