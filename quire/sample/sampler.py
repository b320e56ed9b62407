"""From logits to tokens.

Order: raw logprobs are taken; penalties, bias and masks; temperature; min-p; top-k and top-p; the draw.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.kernels.philox import philox_uniform
from quire.messages.sampling_params import SamplingParams
from quire.sample.processors import LogitsProcessor, MinP, SampleBatch, Temperature, TopKTopP


@dataclass(slots=True)
class SampledLogprobs:
    """m rows that asked; the sampled token first, then the k likeliest, best first."""

    places: list[int]  # which row of the batch
    token_ids: torch.Tensor  # [m, 1 + k]
    logprobs: torch.Tensor  # [m, 1 + k] float32
    ranks: torch.Tensor  # [m]


@dataclass(slots=True)
class Sampled:
    token_ids: torch.Tensor  # [n] int64
    logprobs: SampledLogprobs | None


class Sampler:
    def __init__(self, num_rows: int, device: torch.device, processors: Sequence[LogitsProcessor] = ()) -> None:
        """`processors` are users' own; they come before the built-in ones."""
        built_in: list[LogitsProcessor] = [
            Temperature(num_rows, device),
            MinP(num_rows, device),
            TopKTopP(num_rows, device),
        ]
        self.processors = [*processors, *built_in]
        self.seeds = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.greedy = torch.ones(num_rows, dtype=torch.bool, device=device)
        self._random_rows: set[int] = set()
        self._num_logprobs: dict[int, int] = {}

    def add_row(self, row: int, params: SamplingParams, seed: int) -> None:
        self.seeds[row] = seed
        self.greedy[row] = params.greedy
        if not params.greedy:
            self._random_rows.add(row)
        if params.logprobs is not None:
            self._num_logprobs[row] = params.logprobs
        for processor in self.processors:
            processor.add_row(row, params)

    def remove_row(self, row: int) -> None:
        self._random_rows.discard(row)
        self._num_logprobs.pop(row, None)
        for processor in self.processors:
            processor.remove_row(row)

    def sample(self, logits: torch.Tensor, batch: SampleBatch) -> Sampled:
        """logits: [n, vocab], any float dtype."""
        raw = logits
        any_random = bool(self._random_rows) and not self._random_rows.isdisjoint(batch.row_list)
        masks = [p for p in self.processors if p.changes_argmax and p.active]
        if any_random or masks:
            # Processors work in place; raw logits are still needed if someone wants logprobs of them.
            logits = logits.to(torch.float32, copy=True)
        for processor in masks:
            logits = processor.apply(logits, batch)
        tokens = logits.argmax(dim=1)
        if any_random:
            for processor in self.processors:
                if not processor.changes_argmax and processor.active:
                    logits = processor.apply(logits, batch)
            tokens = torch.where(self.greedy[batch.rows], tokens, self._draw(logits, batch))
        return Sampled(tokens, self._logprobs(raw, tokens, batch))

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

    def _logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, batch: SampleBatch) -> SampledLogprobs | None:
        places = [i for i, row in enumerate(batch.row_list) if row in self._num_logprobs] if self._num_logprobs else []
        if not places:
            return None
        most = max(self._num_logprobs[batch.row_list[i]] for i in places)
        where = torch.tensor(places, device=logits.device)
        logprobs = logits[where].float().log_softmax(dim=1)
        sampled = tokens[where].unsqueeze(1)
        own = logprobs.gather(1, sampled)
        ranks = (logprobs > own).sum(dim=1) + 1
        top = logprobs.topk(min(most, logprobs.shape[1]), dim=1)
        return SampledLogprobs(places, torch.cat([sampled, top.indices], 1), torch.cat([own, top.values], 1), ranks)
