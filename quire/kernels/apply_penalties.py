"""Repetition, frequency and presence penalties on the logits of the rows that use them."""

import torch

from quire.kernels.dispatch import use_triton


def apply_penalties_torch(
    logits: torch.Tensor,
    places: torch.Tensor,
    slots: torch.Tensor,
    in_prompt: torch.Tensor,
    counts: torch.Tensor,
    strength: torch.Tensor,
    drafts: torch.Tensor | None = None,
) -> None:
    repetition, frequency, presence = strength[slots].T.unsqueeze(2)
    used = counts[slots]
    if drafts is not None:
        used.scatter_add_(1, drafts.clamp(min=0).long(), (drafts >= 0).int())
    chosen = logits[places]
    seen = in_prompt[slots] | (used > 0)
    scaled = torch.where(chosen > 0, chosen / repetition, chosen * repetition)
    logits[places] = torch.where(seen, scaled, chosen) - frequency * used - presence * (used > 0)


def apply_penalties(
    logits: torch.Tensor,  # [n, vocab] float32, changed in place
    places: torch.Tensor,  # [m] int64: rows of logits
    slots: torch.Tensor,  # [m] int64: rows of the tables
    in_prompt: torch.Tensor,  # [slots, vocab] bool
    counts: torch.Tensor,  # [slots, vocab] int32: how often each token was generated
    strength: torch.Tensor,  # [slots, 3] float32: repetition, frequency, presence
    drafts: torch.Tensor | None = None,  # [m, k] int32: tokens that count as generated too; -1: none
) -> None:
    """Repetition scales logits, by prompt and output; frequency and presence subtract, by the output alone."""
    if use_triton(logits):
        from quire.kernels.triton import apply_penalties as kernel

        kernel.apply_penalties(logits, places, slots, in_prompt, counts, strength, drafts)
    else:
        apply_penalties_torch(logits, places, slots, in_prompt, counts, strength, drafts)
