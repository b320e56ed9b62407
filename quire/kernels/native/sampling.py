"""Draws and verification of drafts on a CPU."""

import torch

from quire.kernels.native import library, native_function


def serves_sampling(device: torch.device) -> bool:
    return device.type == "cpu" and library() is not None


def uniform(seeds: torch.Tensor, positions: torch.Tensor, purpose: int) -> torch.Tensor:
    seeds, positions = seeds.long().contiguous(), positions.long().contiguous()
    assert seeds.shape == positions.shape
    out = torch.empty(seeds.shape, dtype=torch.float64)
    native_function("quire_uniform")(
        seeds.data_ptr(), positions.data_ptr(), out.data_ptr(), seeds.numel(), purpose
    )  # fmt: skip
    return out


def draw(logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """logits [n, vocab] float32, uniform [n] float64 in [0, 1) -> [n] int64."""
    logits, uniform = logits.contiguous(), uniform.contiguous()
    assert logits.dtype is torch.float32 and uniform.dtype is torch.float64 and len(uniform) == len(logits)
    out = torch.empty(len(logits), dtype=torch.int64)
    native_function("quire_draw")(logits.data_ptr(), uniform.data_ptr(), out.data_ptr(), *logits.shape)
    return out


def accept_drafts(
    tokens: torch.Tensor,
    first: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    num_computed: torch.Tensor,
    token_limit: torch.Tensor,
    out: torch.Tensor,
    num_sampled: torch.Tensor,
) -> None:
    """Shapes as kernels/accept_drafts.py has them; changes by row are in place."""
    tokens, first, rows = tokens.long().contiguous(), first.int().contiguous(), rows.int().contiguous()
    changed = (token_ids, num_tokens, num_computed, token_limit, out, num_sampled)
    assert all(tensor.is_contiguous() for tensor in changed) and len(first) > len(rows)
    native_function("quire_accept_drafts")(
        tokens.data_ptr(), first.data_ptr(), rows.data_ptr(), *(tensor.data_ptr() for tensor in changed),
        len(tokens), len(rows), *token_ids.shape, out.shape[1],
    )  # fmt: skip
