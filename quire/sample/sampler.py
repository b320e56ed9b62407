"""From logits to tokens.

Order: raw logprobs are taken; bias, penalties and masks (bias before penalties, as vLLM and transformers have it);
temperature; min-p; top-k and top-p; the draw.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.kernels.philox import philox_uniform
from quire.messages.plan import NewRow
from quire.sample.logprobs import TokenLogprobs, token_logprobs, widest
from quire.sample.masks import AllowedTokens, BadWords, LogitBias, MinTokens
from quire.sample.penalties import Penalties
from quire.sample.processors import LogitsProcessor, SampleBatch
from quire.sample.warpers import MinP, Temperature, TopKTopP


@dataclass(slots=True)
class Sampled:
    token_ids: torch.Tensor  # [n] int64
    places: list[int]  # rows of the batch that asked for logprobs
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
        built_in: list[LogitsProcessor] = [
            LogitBias(device),
            Penalties(vocab_size, device),
            AllowedTokens(device),
            MinTokens(device),
            BadWords(device),
            Temperature(num_rows, device),
            MinP(num_rows, device),
            TopKTopP(num_rows, device),
        ]
        self.processors = [*processors, *built_in]
        self.seeds = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.greedy = torch.ones(num_rows, dtype=torch.bool, device=device)
        self.raw_logprobs = logprobs_mode.startswith("raw")
        self.as_logits = logprobs_mode.endswith("logits")
        self._random_rows: set[int] = set()
        self._num_logprobs: dict[int, int] = {}

    def add_row(self, new: NewRow) -> None:
        row, params = new.row, new.params
        self.seeds[row] = new.seed
        self.greedy[row] = params.greedy
        if not params.greedy:
            self._random_rows.add(row)
        if params.logprobs is not None:
            self._num_logprobs[row] = params.logprobs
        for processor in self.processors:
            processor.add_row(new)

    def remove_row(self, row: int) -> None:
        self._random_rows.discard(row)
        self._num_logprobs.pop(row, None)
        for processor in self.processors:
            processor.remove_row(row)

    def sample(self, logits: torch.Tensor, batch: SampleBatch) -> Sampled:
        """logits: [n, vocab], any float dtype; left as they are."""
        raw = logits
        any_random = not self._random_rows.isdisjoint(batch.row_list)
        used = [p for p in self.processors if p.active and (any_random or p.changes_argmax)]
        if used or any_random:
            logits = logits.to(torch.float32, copy=True)  # processors work in place
        for processor in used:
            if processor.changes_argmax:
                logits = processor.apply(logits, batch)
        tokens = logits.argmax(dim=1)
        if any_random:
            for processor in used:
                if not processor.changes_argmax:
                    logits = processor.apply(logits, batch)
            tokens = torch.where(self.greedy[batch.rows], tokens, self._draw(logits, batch))
        for processor in used:
            processor.sampled(tokens, batch)
        places = [i for i, row in enumerate(batch.row_list) if row in self._num_logprobs] if self._num_logprobs else []
        return Sampled(tokens, places, self._logprobs(raw if self.raw_logprobs else logits, tokens, places, batch))

    def _draw(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        """One uniform number per row finds its token in the cumulative distribution, in order of token id."""
        uniform = philox_uniform(self.seeds[batch.rows], batch.positions)
        cumulative = logits.softmax(dim=1).cumsum(dim=1)
        target = (uniform * cumulative[:, -1].double()).float().unsqueeze(1)
        # right=True skips tokens of probability 0. Rounding can push the target to the very end: step back to the last
        # possible token.
        found = torch.searchsorted(cumulative, target, right=True)
        last = (cumulative < cumulative[:, -1:]).sum(dim=1, keepdim=True)
        return torch.minimum(found, last).squeeze(1)

    def _logprobs(
        self, scores: torch.Tensor, tokens: torch.Tensor, places: list[int], batch: SampleBatch
    ) -> TokenLogprobs | None:
        if not places:
            return None
        where = torch.tensor(places, device=scores.device)
        count = widest([self._num_logprobs[batch.row_list[i]] for i in places])
        return token_logprobs(scores[where], tokens[where], count, self.as_logits)
