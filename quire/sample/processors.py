"""Logits processors: batch-level objects that change logits before a token is drawn.

Each keeps its parameters by row, in place, so a step only gathers them. Built-in ones and users' own have the same
interface.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from quire.messages.sampling_params import SamplingParams

# Enough candidates for nearly every top-k and top-p; a row that needs more is sorted in full.
CANDIDATES = 1024


@dataclass(slots=True)
class SampleBatch:
    """The rows that sample in this step, in the order of the logits."""

    rows: torch.Tensor  # [n] int64
    row_list: list[int]
    positions: torch.Tensor  # [n] int64: index in its request of the token to be drawn


class LogitsProcessor(Protocol):
    changes_argmax: bool  # whether greedy rows need it

    def add_row(self, row: int, params: SamplingParams) -> None:
        """A request enters the row."""
        ...

    def remove_row(self, row: int) -> None: ...

    @property
    def active(self) -> bool:
        """Whether any row asks for it."""
        ...

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        """[n, vocab] float32 in and out; may work in place."""
        ...


class RowParameters:
    """One number per row with a neutral default; knows which rows differ from it."""

    def __init__(self, num_rows: int, neutral: float, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.values = torch.full((num_rows,), neutral, dtype=dtype, device=device)
        self.neutral = neutral
        self.rows: set[int] = set()

    def set(self, row: int, value: float) -> None:
        self.values[row] = value
        if value == self.neutral:
            self.rows.discard(row)
        else:
            self.rows.add(row)

    def reset(self, row: int) -> None:
        if row in self.rows:
            self.set(row, self.neutral)


class Temperature:
    """Greedy rows (temperature 0) keep their logits: the sampler takes their argmax."""

    changes_argmax = False

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.temperature = RowParameters(num_rows, 1.0, device)

    def add_row(self, row: int, params: SamplingParams) -> None:
        self.temperature.set(row, 1.0 if params.greedy else params.temperature)

    def remove_row(self, row: int) -> None:
        self.temperature.reset(row)

    @property
    def active(self) -> bool:
        return bool(self.temperature.rows)

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        return logits.div_(self.temperature.values[batch.rows].unsqueeze(1))


class MinP:
    """Keeps tokens at least `min_p` times as likely as the likeliest."""

    changes_argmax = False

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.min_p = RowParameters(num_rows, 0.0, device)

    def add_row(self, row: int, params: SamplingParams) -> None:
        self.min_p.set(row, 0.0 if params.greedy else params.min_p)

    def remove_row(self, row: int) -> None:
        self.min_p.reset(row)

    @property
    def active(self) -> bool:
        return bool(self.min_p.rows)

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        # p >= min_p * p_max is a difference of logits: no softmax needed. log(0) = -inf keeps all.
        least = logits.amax(dim=1, keepdim=True) + self.min_p.values[batch.rows].log().unsqueeze(1)
        return logits.masked_fill_(logits < least, -torch.inf)


class TopKTopP:
    """Keeps the k likeliest tokens, then the fewest of those whose probabilities reach p."""

    changes_argmax = False

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.top_k = RowParameters(num_rows, 0, device, torch.int64)
        self.top_p = RowParameters(num_rows, 1.0, device)

    def add_row(self, row: int, params: SamplingParams) -> None:
        self.top_k.set(row, 0 if params.greedy else max(0, params.top_k))
        self.top_p.set(row, 1.0 if params.greedy else params.top_p)

    def remove_row(self, row: int) -> None:
        self.top_k.reset(row)
        self.top_p.reset(row)

    @property
    def active(self) -> bool:
        return bool(self.top_k.rows or self.top_p.rows)

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        users = self.top_k.rows | self.top_p.rows
        places = torch.tensor([i for i, row in enumerate(batch.row_list) if row in users], device=logits.device)
        if not len(places):
            return logits
        rows = batch.rows[places]
        chosen = logits[places]
        least = keep_threshold(chosen, self.top_k.values[rows], self.top_p.values[rows])
        logits[places] = chosen.masked_fill_(chosen < least.unsqueeze(1), -torch.inf)
        return logits


def keep_threshold(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """[n] the lowest logit that top-k (0: off) and then top-p let pass. Tokens equal to it pass too, as in
    transformers."""
    vocab = logits.shape[1]
    count = min(CANDIDATES, vocab)
    least, exact = _threshold_among(logits, logits.topk(count, dim=1).values, top_k, top_p)
    if not bool(exact.all()):
        rest = ~exact
        ordered = logits[rest].sort(dim=1, descending=True).values
        least[rest] = _threshold_among(logits[rest], ordered, top_k[rest], top_p[rest])[0]
    return least


def _threshold_among(
    logits: torch.Tensor, ordered: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The threshold from the best candidates alone, and per row whether they were enough to know it."""
    count, vocab = ordered.shape[1], logits.shape[1]
    limited = (top_k > 0) & (top_k < vocab)
    kth = torch.where(limited, top_k.clamp(1, count) - 1, count - 1)
    least_k = torch.where(limited, ordered.gather(1, kth.unsqueeze(1)).squeeze(1), -torch.inf)
    # Probabilities after top-k; without top-k the denominator runs over all tokens.
    kept = ordered.masked_fill(ordered < least_k.unsqueeze(1), -torch.inf)
    ties = limited & (logits >= least_k.unsqueeze(1)).sum(1).gt(count)
    whole = torch.where(limited, kept.logsumexp(1), logits.logsumexp(1))
    cumulative = (kept - whole.unsqueeze(1)).exp().cumsum(1)
    # A token stays if those before it have not reached p yet; the first always does.
    needed = (cumulative < top_p.unsqueeze(1)).sum(1)
    least_p = ordered.gather(1, needed.clamp(max=count - 1).unsqueeze(1)).squeeze(1)
    least = torch.where(top_p < 1, torch.maximum(least_k, least_p), least_k)
    enough_k = ~limited | (top_k <= count)
    enough_p = (top_p >= 1) | (needed < count) | limited
    return least, (enough_k & enough_p & ~ties) | (count == vocab)
