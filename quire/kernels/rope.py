"""Rotary position embedding, rotate-half form."""

import torch


def gather_cos_sin(cache: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cache [max_pos, R] (cosines of R/2 angles, then sines), positions [N] -> cos, sin, each [N, 1, R].

    The sine's first half is negated: rotating is then x * cos + swap(x) * sin, where swap exchanges the halves.
    """
    cos, sin = cache.index_select(0, positions).chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [N, H, D] with cos, sin [N, 1, R] from gather_cos_sin -> [N, H, D]; dimensions from R on pass unchanged."""
    rotary_dim = cos.shape[-1]
    rotated = x[..., :rotary_dim]
    left, right = rotated.chunk(2, dim=-1)
    out = rotated * cos + torch.cat((right, left), dim=-1) * sin
    if rotary_dim == x.shape[-1]:
        return out
    return torch.cat((out, x[..., rotary_dim:]), dim=-1)
