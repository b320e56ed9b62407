"""From logits to tokens.

Order: raw logprobs; bias, penalties and masks (bias before penalties, as in vLLM and transformers); temperature; min-p;
top-k and top-p; the draw.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quire.kernels import native
from quire.kernels.accept_sampled import DrawnDrafts
from quire.kernels.apply_bitmask import apply_bitmask
from quire.kernels.apply_penalties import apply_penalties
from quire.kernels.dispatch import use_triton
from quire.kernels.sample_tokens import (
    NO_TOKEN,
    Draw,
    TokenRows,
    draw_random,
    has_token,
    sample_and_append,
    sample_tokens,
)
from quire.kernels.transfer import to_device
from quire.messages.plan import GrammarMask, NewRow
from quire.sample.grammar import Grammar
from quire.sample.logprobs import TokenLogprobs, max_logprobs, token_logprobs, with_requested
from quire.sample.masks import AllowedTokens, BadWords, LogitBias, MinTokens
from quire.sample.parameters import ParameterTable
from quire.sample.penalties import Penalties
from quire.sample.processors import LogitsProcessor, SampleBatch
from quire.sample.thinking import ThinkingBudget
from quire.sample.warpers import MinP, Temperature, TopKTopP, Warper


@dataclass(slots=True)
class Sampled:
    token_ids: torch.Tensor  # [n] int64; -1 where the logits hold NaN or allow no token
    places: list[int]  # indices in the batch of the rows that requested logprobs
    logprobs: TokenLogprobs | None


class Sampler:
    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        device: torch.device,
        logprobs_mode: str = "raw_logprobs",
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        """`processors` are users' own; they come before the built-in ones."""
        self.parameters = ParameterTable(num_rows, device)
        self._users = list(processors)
        self._penalties = Penalties(vocab_size, device)
        self._edits = (
            LogitBias(device),
            self._penalties,
            AllowedTokens(device),
            MinTokens(device),
            BadWords(device),
            ThinkingBudget(device),  # last: it overrides all others
        )
        self._grammar = Grammar(device)
        by_row = self.parameters.device
        self._filters = (MinP(by_row), TopKTopP(by_row))
        self.processors: list[LogitsProcessor] = [
            *self._users,
            *self._edits,
            self._grammar,
            Temperature(by_row),
            *self._filters,
        ]
        self.raw_logprobs = logprobs_mode.startswith("raw")
        self.as_logits = logprobs_mode.endswith("logits")
        self._random_rows: set[int] = set()
        self._unfused_rows: set[int] = set()
        self._num_logprobs: dict[int, int] = {}
        self._logprob_ids: dict[int, list[int]] = {}

    def add_row(self, new: NewRow) -> None:
        row, params = new.row, new.params
        self.parameters.set(row, params, new.seed)
        if not params.greedy:
            self._random_rows.add(row)
        if params.logprob_token_ids:
            self._num_logprobs[row], self._logprob_ids[row] = 0, params.logprob_token_ids
        elif params.logprobs is not None:
            self._num_logprobs[row] = params.logprobs
        for processor in self.processors:
            processor.add_row(new)
        if row in self._num_logprobs or any(row in edit.rows for edit in self._edits):
            self._unfused_rows.add(row)

    def remove_row(self, row: int) -> None:
        self._random_rows.discard(row)
        self._unfused_rows.discard(row)
        self._num_logprobs.pop(row, None)
        self._logprob_ids.pop(row, None)
        for processor in self.processors:
            processor.remove_row(row)

    def choose_draw(self, row_list: list[int], grammar: GrammarMask | None = None) -> Draw | None:
        """The draw with which sample_fused() serves these rows; None if only sample() can.

        Also uploads the parameters of new rows, on the current stream: call it before sample_fused().
        """
        self.parameters.upload()
        if (
            grammar is not None
            or _any(self._unfused_rows, row_list)
            or any(processor.active for processor in self._users)
        ):
            return None
        return self._draw_of(row_list)

    def sample_fused(
        self, logits: torch.Tensor, rows: torch.Tensor, state: TokenRows, draw: Draw, out: torch.Tensor
    ) -> None:
        """Sample and append in a few fused launches; nothing waits for the host.

        logits [n, vocab]; rows [n], -1 for padding at the end -> out int32, of all but padding. A row that has computed
        all its tokens gets the sampled one appended. A row with NaN in its logits, or without a possible token: -1, and
        token 0 in its state.
        """
        sample_and_append(logits, rows, state, self.parameters.device, draw, out)

    def draw_fused(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        draw: Draw,
        drafts: DrawnDrafts | None = None,
    ) -> torch.Tensor:
        """The same without appending: see sample_tokens()."""
        return sample_tokens(logits, rows, positions, self.parameters.device, draw, drafts)

    def sample(self, logits: torch.Tensor, batch: SampleBatch, grammar: GrammarMask | None = None) -> Sampled:
        """logits: [n, vocab], any float dtype; not changed. If rows verify drafts, keep_accepted() must follow."""
        self.parameters.upload()
        self._grammar.mask = grammar
        draw = self._draw_of(batch.row_list)
        used = self._used(draw)
        places = [i for i, row in enumerate(batch.row_list) if row in self._num_logprobs] if self._num_logprobs else []
        if use_triton(logits):
            processed, tokens = self._choose_fused(logits, batch, draw, used, bool(places))
        else:
            processed, tokens = self._choose(logits, batch, draw, used)
        known = tokens.clamp(min=0)  # a valid index even for NO_TOKEN
        if batch.num_ahead is None:
            self._keep(known, batch, used)
        return Sampled(tokens, places, self._logprobs(logits if self.raw_logprobs else processed, known, places, batch))

    def keep_accepted(self, tokens: torch.Tensor, batch: SampleBatch) -> None:
        """After verification, with batch.done for those of the sampled tokens [n] that were accepted."""
        self._keep(tokens.clamp(min=0), batch, self._used(self._draw_of(batch.row_list)))

    def check(self, token_ids: np.ndarray) -> None:
        """Of a step's tokens on the host: raise an error that had to wait until other ranks have theirs."""

    @property
    def follows_tokens(self) -> bool:
        """Whether keep_accepted() does anything: some rows' logits depend on the tokens that were kept."""
        return self._penalties.active or any(processor.active for processor in self._users)

    def constrains(self, row_list: list[int]) -> bool:
        """Whether any of these rows has a grammar."""
        return _any(self._grammar.rows, row_list)

    def _used(self, draw: Draw) -> list[LogitsProcessor]:
        return [p for p in self.processors if p.active and (draw >= Draw.RANDOM or p.changes_argmax)]

    @staticmethod
    def _keep(tokens: torch.Tensor, batch: SampleBatch, used: list[LogitsProcessor]) -> None:
        for processor in used:
            processor.sampled(tokens, batch)

    def launch_optional_kernels(self, logits: torch.Tensor, num_tokens: torch.Tensor, num_drafts: int) -> None:
        """On a GPU: launch each kernel that only some requests need, with dummy arguments, so that it can be compiled
        ahead. num_tokens: of the rows. num_drafts: the most that a row verifies."""
        n, vocab = logits.shape
        rows = torch.zeros(n, dtype=torch.int64, device=logits.device)
        for given in (logits, edited := logits.float()):
            for draw in Draw:
                sample_tokens(given, rows, num_tokens[rows], self.parameters.device, draw)
            token_logprobs(given, rows, 1)
        apply_bitmask(edited, rows.new_zeros(n, -(-vocab // 32), dtype=torch.int32), rows)
        in_prompt, counts = (rows.new_zeros(1, vocab, dtype=dtype) for dtype in (torch.bool, torch.int32))
        drafts = [rows.new_zeros(n, num_drafts, dtype=torch.int32)] if num_drafts else []
        for ahead in (None, *drafts):
            apply_penalties(edited, rows, rows, in_prompt, counts, edited.new_zeros(1, 3), ahead)

    def _choose(
        self, logits: torch.Tensor, batch: SampleBatch, draw: Draw, used: list[LogitsProcessor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Processed logits, and [n] tokens."""
        if used or draw >= Draw.RANDOM:
            logits = logits.to(torch.float32, copy=True)  # processors work in place
        logits = _apply([p for p in used if p.changes_argmax], logits, batch)
        tokens = native.argmax(logits) if native.serves(logits) else logits.argmax(dim=1)
        possible = has_token(logits, tokens)
        if draw >= Draw.RANDOM:
            logits = _apply([p for p in used if not p.changes_argmax], logits, batch)
            by_row = self.parameters.device
            # One uniform number per row finds its token in the cumulative distribution, in order of token id.
            drawn = draw_random(logits, batch.rows, batch.positions, by_row, batch.drafts)
            tokens = torch.where(by_row.greedy[batch.rows].bool(), tokens, drawn)
        return logits, torch.where(possible, tokens, NO_TOKEN)

    def _choose_fused(
        self, logits: torch.Tensor, batch: SampleBatch, draw: Draw, used: list[LogitsProcessor], logprobs: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same by fused kernels: temperature, min-p, top-k and top-p are part of the draw."""
        before_draw = [p for p in used if not isinstance(p, Warper)]
        if before_draw:
            logits = logits.to(torch.float32, copy=True)
            logits = _apply([p for p in before_draw if p.changes_argmax], logits, batch)
            logits = _apply([p for p in before_draw if not p.changes_argmax], logits, batch)
        tokens = sample_tokens(logits, batch.rows, batch.positions, self.parameters.device, draw, batch.drafts)
        if logprobs and not self.raw_logprobs:
            logits = logits.to(torch.float32, copy=True)
            logits = _apply([p for p in used if isinstance(p, Warper)], logits, batch)
        return logits, tokens

    def _draw_of(self, row_list: list[int]) -> Draw:
        if not _any(self._random_rows, row_list):
            return Draw.GREEDY
        return Draw.WARPED if any(_any(warper.rows, row_list) for warper in self._filters) else Draw.RANDOM

    def _logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, places: list[int], batch: SampleBatch
    ) -> TokenLogprobs | None:
        if not places:
            return None
        (where,) = to_device(logits.device, places, dtype=np.int64)
        count = max_logprobs([self._num_logprobs[batch.row_list[i]] for i in places])
        found = token_logprobs(logits[where], tokens[where], count, self.as_logits)
        rows = (batch.row_list[i] for i in places)
        requested = {place: self._logprob_ids[row] for place, row in enumerate(rows) if row in self._logprob_ids}
        return with_requested(found, logits[where], requested, self.as_logits) if requested else found


def _any(rows: set[int], row_list: list[int]) -> bool:
    return bool(rows) and not rows.isdisjoint(row_list)


def _apply(processors: list[LogitsProcessor], logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
    for processor in processors:
        logits = processor.apply(logits, batch)
    return logits
