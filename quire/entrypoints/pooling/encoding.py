"""Vectors in responses: as JSON numbers, base64 or bytes, in several precisions."""

import base64
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.config.shown import shown

FORMATS = ("float", "base64", "bytes", "bytes_only")
DTYPES = ("float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
ENDIANNESS = ("native", "little", "big")


@dataclass(frozen=True)
class Encoding:
    format: str = "float"
    dtype: str = "float32"  # of base64 and bytes
    endianness: str = "native"

    @classmethod
    def of(cls, format: str | None, dtype: str | None, endianness: str | None) -> "Encoding":
        found = cls(format or "float", dtype or "float32", endianness or "native")
        for name, given, allowed in (
            ("encoding_format", found.format, FORMATS),
            ("embed_dtype", found.dtype, DTYPES),
            ("endianness", found.endianness, ENDIANNESS),
        ):
            if given not in allowed:
                raise ValueError(f"{name} is {shown(given)}; allowed: {', '.join(allowed)}")
        return found

    @property
    def is_json(self) -> bool:
        return self.format in ("float", "base64")

    def values(self, arrays: Sequence[np.ndarray]) -> list[Any]:
        """Of JSON responses: lists of numbers, or base64."""
        if self.format == "float":
            equal = len({array.shape for array in arrays}) == 1
            return np.stack(arrays).tolist() if equal else [array.tolist() for array in arrays]
        return [base64.b64encode(self.binary(array)).decode() for array in arrays]

    def binary(self, array: np.ndarray) -> bytes:
        converted = converted_to(array, self.dtype)
        other = self.endianness not in ("native", sys.byteorder)
        return (converted.byteswap() if other and converted.itemsize > 1 else converted).tobytes()


def converted_to(array: np.ndarray, dtype: str) -> np.ndarray:
    """numpy has no bfloat16 and no fp8: those are their bits."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # rounded to nearest, ties to even
    if dtype.startswith("fp8"):
        exponent_bits = 4 if dtype == "fp8_e4m3" else 5
        return _to_fp8(np.asarray(array, np.float32), exponent_bits)
    return array.astype(dtype)


def _to_fp8(array: np.ndarray, exponent_bits: int) -> np.ndarray:
    """The nearest number's bits; what is larger than all becomes the largest."""
    values = _fp8_values(exponent_bits)
    sizes = np.minimum(np.abs(array), values[-1])
    above = np.searchsorted(values, sizes).clip(1, len(values) - 1)
    low, high = values[above - 1], values[above]
    nearer_high = (high - sizes < sizes - low) | ((high - sizes == sizes - low) & (above % 2 == 0))
    return ((above - 1 + nearer_high) | (np.signbit(array) << 7)).astype(np.uint8)


@functools.cache
def _fp8_values(exponent_bits: int) -> np.ndarray:
    """All finite numbers from 0 on, in the order of their bits."""
    mantissa_bits = 7 - exponent_bits
    bias = 2 ** (exponent_bits - 1) - 1
    bits = np.arange(128)
    exponent, mantissa = bits >> mantissa_bits, bits & (2**mantissa_bits - 1)
    normal = (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)
    values = np.where(exponent == 0, mantissa / 2**mantissa_bits * 2.0 ** (1 - bias), normal)
    # e4m3 has one NaN and no infinity; the last exponent of e5m2 is neither.
    return values[:127] if exponent_bits == 4 else values[: 128 - 2**mantissa_bits]
