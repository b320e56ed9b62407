"""The lowest logit that top-k and top-p keep.

The Triton half is part of the draw (`sample_tokens`), whose statistics it reuses; see
`quire/kernels/triton/keep_threshold.py`.
"""

import torch

# Enough candidates for nearly every top-k and top-p; a row that needs more is sorted in full.
CANDIDATES = 1024


def keep_threshold(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """[n] the lowest logit that top-k (0: off) and then top-p keep. Tokens equal to it are kept too, as in
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
    """The threshold from the best candidates alone, and per row whether they were enough to be exact."""
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
