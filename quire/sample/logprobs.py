"""Log-probabilities of chosen tokens and of the likeliest ones."""

from dataclasses import dataclass

import torch

from quire.kernels.dispatch import use_triton
from quire.kernels.gather_logprobs import gather_logprobs
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


def max_logprobs(counts: list[int]) -> int:
    """The number of logprobs that covers all of these requests."""
    return ALL_LOGPROBS if ALL_LOGPROBS in counts else max(counts)
