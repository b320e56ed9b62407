"""Per row of logits, what logprobs need: the chosen logit, the logsumexp and the rank, without a copy of the row."""

from dataclasses import dataclass

import torch

from quire.kernels.dispatch import use_triton


@dataclass(slots=True)
class LogprobStats:
    chosen: torch.Tensor  # [m] float32: the chosen token's logit
    logsumexp: torch.Tensor  # [m] float32: what to subtract from a logit for its logprob
    ranks: torch.Tensor  # [m] int64: 1 for the likeliest


def gather_logprobs_torch(logits: torch.Tensor, chosen: torch.Tensor) -> LogprobStats:
    logits = logits.float()
    own = logits.gather(1, chosen.unsqueeze(1))
    return LogprobStats(own.squeeze(1), logits.logsumexp(dim=1), (logits > own).sum(dim=1) + 1)


def gather_logprobs(logits: torch.Tensor, chosen: torch.Tensor) -> LogprobStats:
    """logits [m, vocab] of any float dtype, chosen [m] int64."""
    if use_triton(logits):
        from quire.kernels.triton import gather_logprobs as kernel

        found = LogprobStats(
            torch.empty(len(chosen), dtype=torch.float32, device=logits.device),
            torch.empty(len(chosen), dtype=torch.float32, device=logits.device),
            torch.empty(len(chosen), dtype=torch.int64, device=logits.device),
        )
        kernel.gather_logprobs(logits, chosen, found.chosen, found.logsumexp, found.ranks)
        return found
    return gather_logprobs_torch(logits, chosen)
