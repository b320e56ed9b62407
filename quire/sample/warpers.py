"""Temperature, min-p, top-k and top-p: they shape the distribution that random rows are sampled from.

On a GPU these are part of the draw itself (`kernels/sample_tokens.py`); there they run only for logprobs of processed
logits.
"""

import numpy as np
import torch

from quire.kernels.keep_threshold import keep_threshold
from quire.kernels.sample_tokens import DrawParameters
from quire.kernels.transfer import to_device
from quire.messages.plan import NewRow
from quire.messages.sampling_params import SamplingParams
from quire.sample.processors import SampleBatch


class Warper:
    """Tracks which rows use it; their parameters are in the sampler's table. The argmax does not change, so greedy rows
    skip it."""

    changes_argmax = False

    def __init__(self, parameters: DrawParameters) -> None:
        self.parameters = parameters
        self.rows: set[int] = set()

    def applies_to(self, params: SamplingParams) -> bool:
        raise NotImplementedError

    def add_row(self, new: NewRow) -> None:
        if not new.params.greedy and self.applies_to(new.params):
            self.rows.add(new.row)

    def remove_row(self, row: int) -> None:
        self.rows.discard(row)

    @property
    def active(self) -> bool:
        return bool(self.rows)

    def sampled(self, token_ids: torch.Tensor, batch: SampleBatch) -> None: ...


class Temperature(Warper):
    def applies_to(self, params: SamplingParams) -> bool:
        return params.temperature != 1

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        return logits.div_(self.parameters.temperature[batch.rows].unsqueeze(1))


class MinP(Warper):
    """Keeps tokens at least `min_p` times as likely as the likeliest."""

    def applies_to(self, params: SamplingParams) -> bool:
        return params.min_p > 0

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        # p >= min_p * p_max is a difference of logits: no softmax needed.
        least = logits.amax(dim=1, keepdim=True) + self.parameters.log_min_p[batch.rows].unsqueeze(1)
        return logits.masked_fill_(logits < least, -torch.inf)


class TopKTopP(Warper):
    """Keeps the k likeliest tokens, then the fewest of those whose probabilities reach p."""

    def applies_to(self, params: SamplingParams) -> bool:
        return params.top_k > 0 or params.top_p < 1

    def apply(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        places = [i for i, row in enumerate(batch.row_list) if row in self.rows]
        if not places:
            return logits
        (where,) = to_device(logits.device, places, dtype=np.int64)
        rows = batch.rows[where]
        chosen = logits[where]
        least = keep_threshold(chosen, self.parameters.top_k[rows].long(), self.parameters.top_p[rows])
        logits[where] = chosen.masked_fill_(chosen < least.unsqueeze(1), -torch.inf)
        return logits
