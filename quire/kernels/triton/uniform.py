"""Random numbers of the device: `philox_uniform` inside a kernel."""

import triton
import triton.language as tl


@triton.jit
def uniform(seed, position, PURPOSE: tl.constexpr):
    """philox_uniform of one position."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c0, c1, _, _ = tl.philox(seed, low, high, low * 0 + PURPOSE, low * 0)
    bits = (c0.to(tl.int64) << 21) | (c1.to(tl.int64) >> 11)
    return bits.to(tl.float64) * 1.1102230246251565e-16  # 2 ** -53
