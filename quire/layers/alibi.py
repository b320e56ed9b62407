"""ALiBi slopes."""

import math

import torch


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """float32 [H]: powers of 2 ** (-8 / n) for n heads, if n is a power of two; further heads get every second slope of
    the next power of two."""
    whole = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
    between = [2 ** (-4 * (2 * i + 1) / whole) for i in range(num_heads - whole)]
    return torch.tensor(slopes + between, dtype=torch.float32)
