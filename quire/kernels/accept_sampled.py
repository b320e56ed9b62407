"""Drafts that were drawn from a distribution q, where the sampler draws from p: the token at a draft's position is the
draft with probability min(1, p / q) of it, else one drawn from max(p - q, 0) (Leviathan et al., "Fast inference from
transformers via speculative decoding", ICML 2023). Such a token has the distribution p whatever q is.

It takes the place of the token that is drawn without drafts, and equals the draft where that is accepted. So everything
after the draw is the same for both kinds of drafts: logprobs, what counts tokens, `accept_drafts`.
"""

from dataclasses import dataclass

import torch

from quire.kernels.philox import Purpose, philox_uniform


@dataclass(slots=True)
class DrawnDrafts:
    """The drafts at the n positions of a batch, and what each was drawn from: softmax(logits / its row's temperature),
    without top-k, top-p and min-p."""

    tokens: torch.Tensor  # [n] int64; -1 where there is none, or one that was not drawn
    places: torch.Tensor  # [n] int64: which of the logits
    logits: torch.Tensor  # [any, draft vocab]
    draft_ids: (
        torch.Tensor | None
    )  # [vocab] int64: where a token is in the draft vocabulary, -1: nowhere; None: as here


def pick_torch(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """weights [n, vocab] float32, of any sum; uniform [n] float64 in [0, 1) -> [n] int64."""
    cumulative = weights.cumsum(dim=1)
    target = (uniform * cumulative[:, -1].double()).float().unsqueeze(1)
    # right=True skips tokens of weight 0. Rounding can push the target to the very end: step back to the last possible
    # token.
    found = torch.searchsorted(cumulative, target, right=True)
    last = (cumulative < cumulative[:, -1:]).sum(dim=1, keepdim=True)
    return torch.minimum(found, last).squeeze(1)


def accept_sampled_torch(
    tokens: torch.Tensor,  # [n]: as drawn without drafts
    logits: torch.Tensor,  # [n, vocab] float32: p is their softmax
    temperature: torch.Tensor,  # [n]
    seeds: torch.Tensor,  # [n]
    positions: torch.Tensor,  # [n]
    drafts: DrawnDrafts,
) -> torch.Tensor:
    """[n] tokens, with those at positions of drawn drafts replaced."""
    where = (drafts.tokens >= 0).nonzero().squeeze(1)
    p = logits[where].softmax(dim=1)
    q = (drafts.logits[drafts.places[where]].float() / temperature[where].unsqueeze(1)).softmax(dim=1)
    if drafts.draft_ids is not None:
        q = torch.where(drafts.draft_ids >= 0, q[:, drafts.draft_ids.clamp(min=0)], 0)
    draft, seeds, positions = drafts.tokens[where], seeds[where], positions[where]
    p_draft, q_draft = (each.gather(1, draft.unsqueeze(1)).squeeze(1).double() for each in (p, q))
    accepted = philox_uniform(seeds, positions, Purpose.ACCEPT) * q_draft < p_draft
    rest = (p - q).clamp_(min=0)
    other = pick_torch(rest, philox_uniform(seeds, positions, Purpose.RESIDUAL))
    # Nothing is left where p and q are equal but for rounding.
    other = torch.where(rest.sum(dim=1) > 0, other, tokens[where])
    return tokens.index_copy(0, where, torch.where(accepted, draft, other))
