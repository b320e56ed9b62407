"""Log-probabilities of chosen tokens and of the likeliest ones."""

from dataclasses import dataclass

import numpy as np
import torch

from quire.kernels.dispatch import use_triton
from quire.kernels.gather_logprobs import gather_logprobs
from quire.kernels.transfer import to_device
from quire.messages.sampling_params import ALL_LOGPROBS

# Rows of logits computed at a time for a prompt: all at once would need gigabytes for a long one.
PROMPT_SLICE = 512


@dataclass(slots=True)
class TokenLogprobs:
    """m positions; the chosen token first, then the k likeliest, best first."""

    token_ids: torch.Tensor  # [m, 1 + k]
    logprobs: torch.Tensor  # [m, 1 + k] float32
    ranks: torch.Tensor  # [m]: 1 for the likeliest


def token_logprobs(logits: torch.Tensor, chosen: torch.Tensor, count: int, as_logits: bool = False) -> TokenLogprobs:
    """logits [m, vocab]; `count` may be -1 for the whole vocabulary. `as_logits`: values are not normalised."""
    vocab = logits.shape[1]
    whole = count == ALL_LOGPROBS
    if use_triton(logits) and not whole:
        found = gather_logprobs(logits, chosen)
        top = logits.topk(min(count, vocab), dim=1)
        values = torch.cat([found.chosen.unsqueeze(1), top.values.float()], 1)
        if not as_logits:
            values -= found.logsumexp.unsqueeze(1)
        return TokenLogprobs(torch.cat([chosen.unsqueeze(1), top.indices], 1), values, found.ranks)
    values = logits.float() if as_logits else logits.float().log_softmax(dim=1)
    chosen = chosen.unsqueeze(1)
    own = values.gather(1, chosen)
    ranks = (values > own).sum(dim=1) + 1
    top = values.topk(vocab if whole else min(count, vocab), dim=1)
    return TokenLogprobs(torch.cat([chosen, top.indices], 1), torch.cat([own, top.values], 1), ranks)


def with_requested(
    found: TokenLogprobs, logits: torch.Tensor, requested: dict[int, list[int]], as_logits: bool = False
) -> TokenLogprobs:
    """logits [m, vocab]: the positions in `requested` have the logprobs of these tokens in place of the likeliest."""
    width = max(found.token_ids.shape[1], 1 + max(map(len, requested.values())))
    missing = width - found.token_ids.shape[1]
    ids = torch.nn.functional.pad(found.token_ids, (0, missing))
    values = torch.nn.functional.pad(found.logprobs, (0, missing), value=-torch.inf)
    flat = [(place, column, token) for place, of in requested.items() for column, token in enumerate(of, start=1)]
    places, columns, tokens = to_device(logits.device, *np.array(flat).T, dtype=np.int64)
    ids[places, columns] = tokens
    chosen = logits[places, tokens].float()
    values[places, columns] = chosen if as_logits else chosen - logits.float().logsumexp(dim=1)[places]
    return TokenLogprobs(ids, values, found.ranks)


def candidate_logprobs(logits: torch.Tensor, candidates: torch.Tensor, as_logits: bool = False) -> torch.Tensor:
    """logits [m, vocab], candidates [m, k] -> [m, k] float32; -inf where a candidate is -1."""
    values = logits.float() if as_logits else logits.float().log_softmax(dim=1)
    return values.gather(1, candidates.clamp(min=0)).masked_fill(candidates < 0, -torch.inf)


def max_logprobs(counts: list[int]) -> int:
    """The number of logprobs that covers all of these requests."""
    return ALL_LOGPROBS if ALL_LOGPROBS in counts else max(counts)
