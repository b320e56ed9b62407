"""Temperature, min-p, top-k and top-p: what shapes the distribution that random rows draw from."""

import torch

from quire.messages.plan import NewRow
from quire.sample.processors import SampleBatch

# Enough candidates for nearly every top-k and top-p; a row that needs more is sorted in full.
CANDIDATES = 1024


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


class Warper:
    """The likeliest token stays the likeliest, so greedy rows do without."""

    changes_argmax = False
    parameters: tuple[RowParameters, ...]

    def remove_row(self, row: int) -> None:
        for parameter in self.parameters:
            parameter.reset(row)

    @property
    def active(self) -> bool:
        return any(parameter.rows for parameter in self.parameters)

    def sampled(self, token_ids: torch.Tensor, batch: SampleBatch) -> None: ...


class Temperature(Warper):
    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.temperature = RowParameters(num_rows, 1.0, device)
        self.parameters = (self.temperature,)

    def add_row(self, new: NewRow) -> None:
        self.temperature.set(new.row, 1.0 if new.params.greedy else new.params.temperature)

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        return logits.div_(self.temperature.values[batch.rows].unsqueeze(1))


class MinP(Warper):
    """Keeps tokens at least `min_p` times as likely as the likeliest."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.min_p = RowParameters(num_rows, 0.0, device)
        self.parameters = (self.min_p,)

    def add_row(self, new: NewRow) -> None:
        self.min_p.set(new.row, 0.0 if new.params.greedy else new.params.min_p)

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        # p >= min_p * p_max is a difference of logits: no softmax needed. log(0) = -inf keeps all.
        least = logits.amax(dim=1, keepdim=True) + self.min_p.values[batch.rows].log().unsqueeze(1)
        return logits.masked_fill_(logits < least, -torch.inf)


class TopKTopP(Warper):
    """Keeps the k likeliest tokens, then the fewest of those whose probabilities reach p."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.top_k = RowParameters(num_rows, 0, device, torch.int64)
        self.top_p = RowParameters(num_rows, 1.0, device)
        self.parameters = (self.top_k, self.top_p)

    def add_row(self, new: NewRow) -> None:
        self.top_k.set(new.row, 0 if new.params.greedy else max(0, new.params.top_k))
        self.top_p.set(new.row, 1.0 if new.params.greedy else new.params.top_p)

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
    count = min(CANDIDATES, logits.shape[1])
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
