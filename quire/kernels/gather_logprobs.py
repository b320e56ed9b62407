"""What logprobs need of whole rows of logits, without a second copy of them."""

from dataclasses import dataclass

import torch

from quire.kernels.dispatch import use_triton


@dataclass(slots=True)
class RowScores:
    chosen: torch.Tensor  # [m] float32: the chosen token's logit
    logsumexp: torch.Tensor  # [m] float32: what to subtract from a logit for its logprob
    ranks: torch.Tensor  # [m] int64: 1 for the likeliest


def gather_logprobs_torch(scores: torch.Tensor, chosen: torch.Tensor) -> RowScores:
    scores = scores.float()
    own = scores.gather(1, chosen.unsqueeze(1))
    return RowScores(own.squeeze(1), scores.logsumexp(dim=1), (scores > own).sum(dim=1) + 1)


def gather_logprobs(scores: torch.Tensor, chosen: torch.Tensor) -> RowScores:
    """scores [m, vocab] of any float dtype, chosen [m] int64."""
    if use_triton(scores):
        from quire.kernels.triton import gather_logprobs as kernel

        found = RowScores(
            torch.empty(len(chosen), dtype=torch.float32, device=scores.device),
            torch.empty(len(chosen), dtype=torch.float32, device=scores.device),
            torch.empty(len(chosen), dtype=torch.int64, device=scores.device),
        )
        kernel.gather_logprobs(scores, chosen, found.chosen, found.logsumexp, found.ranks)
        return found
    return gather_logprobs_torch(scores, chosen)
