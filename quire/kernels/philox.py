"""Counter-based random numbers: a draw depends on (seed, position, purpose) alone, never on the batch or on history.

So a token sampled again after a preemption is the same token. Philox4x32-10, Salmon et al., "Parallel random numbers:
as easy as 1, 2, 3" (SC 2011).
"""

import enum

import torch

from quire.kernels.native.sampling import serves_sampling, uniform

_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85


class Purpose(enum.IntEnum):
    SAMPLE = 0
    ACCEPT = 1
    RESIDUAL = 2
    DRAFT = 3


def philox_words(seed: torch.Tensor, position: torch.Tensor, purpose: Purpose) -> tuple[torch.Tensor, ...]:
    """seed, position: [n] int64. Four 32-bit words each, as int64."""
    c0, c1 = position & _MASK, (position >> 32) & _MASK
    c2 = torch.full_like(c0, int(purpose))
    c3 = torch.zeros_like(c0)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        # 32 x 32 -> 64 bits: int64 wraps, but its two halves come out right under the mask.
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def philox_uniform(seed: torch.Tensor, position: torch.Tensor, purpose: Purpose = Purpose.SAMPLE) -> torch.Tensor:
    """[n] float64 in [0, 1), 53 bits."""
    if serves_sampling(seed.device):
        return uniform(seed, position, int(purpose))
    return philox_uniform_torch(seed, position, purpose)


def philox_uniform_torch(seed: torch.Tensor, position: torch.Tensor, purpose: Purpose) -> torch.Tensor:
    c0, c1, _, _ = philox_words(seed, position, purpose)
    return ((c0 << 21) | (c1 >> 11)).double() * 2.0**-53
