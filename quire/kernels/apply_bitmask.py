"""Tokens that a grammar forbids, as bits."""

import torch

from quire.kernels.dispatch import use_triton


def apply_bitmask_torch(logits: torch.Tensor, bitmask: torch.Tensor, places: torch.Tensor) -> None:
    bits = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    allowed = ((bitmask.unsqueeze(2) >> bits) & 1).flatten(1)[:, : logits.shape[1]].bool()
    logits[places] = logits[places].masked_fill_(~allowed, -torch.inf)


def apply_bitmask(
    logits: torch.Tensor,  # [n, vocab] of any float dtype, changed in place
    bitmask: torch.Tensor,  # [m, ceil(vocab / 32)] int32: bit t % 32 of word t // 32 allows token t
    places: torch.Tensor,  # [m] int64: rows of logits
) -> None:
    """-inf where the bit is 0."""
    if use_triton(logits):
        from quire.kernels.triton import apply_bitmask as kernel

        kernel.apply_bitmask(logits, bitmask, places)
    else:
        apply_bitmask_torch(logits, bitmask, places)
