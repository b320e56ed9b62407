"""Drafts that a proposer draws from its own distribution, and keeps that for verification."""

import numpy as np
import torch

from quire.kernels.accept_drafts import DraftRows
from quire.kernels.accept_sampled import DrawnDrafts
from quire.kernels.philox import Purpose
from quire.kernels.sample_tokens import Draw, DrawParameters, sample_tokens
from quire.kernels.transfer import to_device

MAX_BYTES = 4 << 30


class SampledDrafts:
    """The logits of every row's drafts over the draft vocabulary, [rows, drafts, draft vocab], allocated once.

    A draft is drawn from softmax(logits / temperature) by the row's seed and its position. How many drafts a row gets
    may depend on anything but the drafts drawn themselves: leaving out those of low probability would bias the text.
    """

    def __init__(
        self,
        num_rows: int,
        num_drafts: int,
        vocab_size: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        target_ids: torch.Tensor | None = None,  # [draft vocab]: its tokens, if it is not the whole vocabulary
    ) -> None:
        width = vocab_size if target_ids is None else len(target_ids)
        size = (num_rows + 1) * num_drafts * width * dtype.itemsize
        if size > MAX_BYTES:
            raise ValueError(
                f"draft_sample_method 'probabilistic' keeps the logits of {num_drafts} drafts x {num_rows} rows x "
                f"{width} tokens: {size >> 20} MiB, more than {MAX_BYTES >> 20}; lower --max-num-seqs or "
                "num_speculative_tokens, or use 'greedy'"
            )
        # One row more, for padding.
        self.logits = torch.zeros(num_rows + 1, num_drafts, width, dtype=dtype, device=device)
        # The number of known tokens that a row's drafts follow. A row may hold others: it has been resumed, say.
        self.known = torch.full((num_rows + 1,), -1, dtype=torch.int64, device=device)
        self.target_ids = None if target_ids is None else target_ids.to(device, torch.int64)
        self.draft_ids: torch.Tensor | None = None
        if self.target_ids is not None:
            self.draft_ids = torch.full((vocab_size,), -1, dtype=torch.int64, device=device)
            self.draft_ids[self.target_ids] = torch.arange(width, device=device)

    def draw(
        self, index: int, logits: torch.Tensor, rows: torch.Tensor, state: DraftRows, parameters: DrawParameters
    ) -> torch.Tensor:
        """[n] int64: draft `index` of rows [n] (-1: padding) from logits [n, draft vocab]; greedy rows get the
        likeliest. The caller writes them into the rows' token ids. May be captured."""
        row = torch.where(rows < 0, len(self.known) - 1, rows).long()
        known = state.num_tokens[rows.clamp(min=0).long()]
        kept = logits.to(self.logits.dtype)  # drawn from what is kept: rounding would be a bias
        self.logits[row, index] = kept
        if index == 0:
            self.known[row] = known
        tokens = sample_tokens(kept, rows, known + index, parameters, Draw.RANDOM, purpose=Purpose.DRAFT)
        tokens = tokens.clamp(0, kept.shape[1] - 1)
        return tokens if self.target_ids is None else self.target_ids[tokens]

    def launch_kernels(self, logits: torch.Tensor, state: DraftRows, parameters: DrawParameters) -> None:
        """On a GPU: launch each kernel of drawing and accepting with dummy arguments, so that it can be compiled ahead.
        logits [n, vocab] as the model has them."""
        rows = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        self.draw(0, self.logits[: len(rows), 0], (rows - 1).int(), state, parameters)
        drafts = self.at(rows, rows, rows + 1, state, parameters.greedy)
        for given in (logits, logits.float()):
            for draw in (Draw.RANDOM, Draw.WARPED):
                sample_tokens(given, rows, rows, parameters, draw, drafts)

    def forget(self, rows: list[int]) -> None:
        """They have been given to requests, whose drafts these are not."""
        if rows:
            self.known[to_device(self.known.device, rows, dtype=np.int64)[0]] = -1

    def at(
        self,
        rows: torch.Tensor,  # [n] int64
        ahead: torch.Tensor,  # [n]: drafts before each position
        counts: torch.Tensor,  # [n]: drafts that its row verifies
        state: DraftRows,
        greedy: torch.Tensor,  # [rows] int32
    ) -> DrawnDrafts:
        """Before the step's tokens are accepted."""
        known, ahead = state.num_tokens[rows], ahead.long()
        drawn = (ahead < counts) & (self.known[rows] == known) & (greedy[rows] == 0)
        held = state.token_ids[rows, (known + ahead).clamp(max=state.token_ids.shape[1] - 1)].long()
        num_drafts = self.logits.shape[1]
        places = rows * num_drafts + ahead.clamp(max=num_drafts - 1)
        return DrawnDrafts(torch.where(drawn, held, -1), places, self.logits.flatten(0, 1), self.draft_ids)
