"""Dequantizes GGUF blocks to float32, as torch operations on the bytes of the file.

Each function maps blocks, uint8 [n, bytes per block], to float32 [n, numbers per block]. All products are
exact in float32 (an 11-bit scale times a few bits), so the order of operations does not change a bit of the result.
"""

from collections.abc import Callable
from functools import lru_cache

import torch

Dequantize = Callable[[torch.Tensor], torch.Tensor]


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of every block, as float32 [n, 1]."""
    return blocks[:, start : start + 2].view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., k] -> float32 [..., 2, k]: the low halves of all bytes, then the high halves."""
    values = torch.empty(*packed.shape[:-1], 2, packed.shape[-1])
    values[..., 0, :] = packed & 0xF
    values[..., 1, :] = packed >> 4
    return values


def dequantize_q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """float16 scale, 16 bytes of nibbles with an offset of 8."""
    return _nibbles(blocks[:, 2:]).flatten(1).sub_(8).mul_(_half(blocks, 0))


def dequantize_q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """float16 scale, float16 minimum, 16 bytes of nibbles."""
    return _nibbles(blocks[:, 4:]).flatten(1).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def dequantize_q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """float16 scale, 32 signed bytes."""
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _q5(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """4 bytes of fifth bits and 16 of nibbles, uint8 [n, 4] and [n, 16] -> float32 [n, 32]."""
    fifth = high.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8) & 1
    return _nibbles(low).flatten(1).add_(fifth.flatten(1), alpha=16)


def dequantize_q5_0(blocks: torch.Tensor) -> torch.Tensor:
    """float16 scale, 4 bytes of fifth bits, 16 of nibbles, with an offset of 16."""
    return _q5(blocks[:, 2:6], blocks[:, 6:]).sub_(16).mul_(_half(blocks, 0))


def dequantize_q5_1(blocks: torch.Tensor) -> torch.Tensor:
    """float16 scale, float16 minimum, 4 bytes of fifth bits, 16 of nibbles."""
    return _q5(blocks[:, 4:8], blocks[:, 8:]).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima of the 8 sub-blocks of a Q4_K or Q5_K block, float32 [n, 8, 1]."""
    low_scales, low_mins, rest = blocks[:, 4:16].unflatten(1, (3, 4)).unbind(1)
    # Sub-blocks 0..3 have their 6 bits in one byte; 4..7 have a nibble of `rest` and the two bits left in the byte of
    # sub-block i-4.
    scales = torch.cat((low_scales & 63, (rest & 15) | (low_scales >> 6 << 4)), dim=1)
    mins = torch.cat((low_mins & 63, (rest >> 4) | (low_mins >> 6 << 4)), dim=1)
    return (_half(blocks, 0) * scales).unsqueeze(2), (_half(blocks, 2) * mins).unsqueeze(2)


def dequantize_q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """float16 scale and minimum, 12 bytes of 6-bit scales and minima, then 4 runs of 32 bytes of nibbles."""
    scale, minimum = _k_scales(blocks)
    values = _nibbles(blocks[:, 16:].unflatten(1, (4, 32))).view(-1, 8, 32)
    return values.mul_(scale).sub_(minimum).flatten(1)


def dequantize_q5_k(blocks: torch.Tensor) -> torch.Tensor:
    """As Q4_K, with 32 bytes of fifth bits before the nibbles: bit i of a byte belongs to sub-block i."""
    scale, minimum = _k_scales(blocks)
    fifth = blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    values = _nibbles(blocks[:, 48:].unflatten(1, (4, 32))).view(-1, 8, 32).add_(fifth, alpha=16)
    return values.mul_(scale).sub_(minimum).flatten(1)


def dequantize_q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """128 bytes of low nibbles, 64 of high bit pairs, 16 signed sub-block scales, float16 scale; offset 32.

    A half of 128 numbers takes 64 low and 32 high bytes; its 4 runs of 32 have their high bits at shifts 0, 2, 4, 6.
    """
    low = blocks[:, :128].unflatten(1, (2, 2, 32))
    high = blocks[:, 128:192].unflatten(1, (2, 32))
    values = torch.empty(len(blocks), 2, 4, 32)
    for run in range(4):
        nibble = low[:, :, run % 2] & 15 if run < 2 else low[:, :, run % 2] >> 4
        values[:, :, run] = nibble | ((high >> 2 * run & 3) << 4)
    scale = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    return values.view(-1, 16, 16).sub_(32).mul_(scale.unsqueeze(2)).flatten(1)


_OWN: dict[str, Dequantize] = {
    "F32": lambda blocks: blocks.view(torch.float32),
    "F16": lambda blocks: blocks.view(torch.float16),
    "BF16": lambda blocks: blocks.view(torch.bfloat16),
    "Q4_0": dequantize_q4_0,
    "Q4_1": dequantize_q4_1,
    "Q5_0": dequantize_q5_0,
    "Q5_1": dequantize_q5_1,
    "Q8_0": dequantize_q8_0,
    "Q4_K": dequantize_q4_k,
    "Q5_K": dequantize_q5_k,
    "Q6_K": dequantize_q6_k,
}


@lru_cache(maxsize=64)
def dequantizer(type_name: str, type_id: int) -> Dequantize | None:
    """The function for a type: Quire's own, else the gguf package's (slower), else None."""
    own = _OWN.get(type_name)
    if own is not None:
        return own
    import gguf
    import numpy as np

    kind = gguf.GGMLQuantizationType(type_id)
    try:
        # Also fills the package's lookup tables, so that threads only read them later.
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except NotImplementedError:
        return None
    return lambda blocks: torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), kind))
