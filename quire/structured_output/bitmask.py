"""Token bitmasks: token t is bit t % 32 of int32 word t // 32."""

from collections.abc import Iterable

import numpy as np


def make_bitmask(allowed: Iterable[bool]) -> np.ndarray:
    """From one flag per token. Bits beyond the vocabulary are 0."""
    flags = np.fromiter(allowed, np.uint8)
    bits = np.zeros((len(flags) + 31) // 32 * 32, np.uint8)
    bits[: len(flags)] = flags
    return np.packbits(bits, bitorder="little").view(np.int32)


def is_set(row: np.ndarray, token: int) -> bool:
    return bool((int(row[token // 32]) >> (token % 32)) & 1)


def set_bit(row: np.ndarray, token: int, allowed: bool) -> None:
    words = row.view(np.uint32)
    bit = np.uint32(1 << (token % 32))
    words[token // 32] = words[token // 32] | bit if allowed else words[token // 32] & ~bit
