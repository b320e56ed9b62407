"""The choice of kernel for many rows times a weight, both quantized: measured for known shapes, by rule for others.

`benchmarks/gpu/scaled_linear.py` measures every candidate and prints the lines of MEASURED.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["blocks", "int8"]  # fp8 with a scale per block; int8 with a scale per output
BUCKETS = (128, 256, 512, 1024, 4096)  # rows; more are as the last


@dataclass(frozen=True)
class ScaledConfig:
    block_m: int
    block_n: int
    block_k: int = 128
    warps: int = 8
    stages: int = 4
    tma: bool = True


# (kind, rows, inputs, outputs) -> kernel; None: the library. Rows are the bucket's upper end. On an H200.
MEASURED: dict[tuple[Kind, int, int, int], ScaledConfig | None] = {
    ("blocks", 128, 4096, 6144): ScaledConfig(block_m=64, block_n=64, warps=4, stages=6),
    ("blocks", 256, 4096, 6144): None,
    ("blocks", 512, 4096, 6144): ScaledConfig(block_m=64, block_n=128, warps=4, stages=3),
    ("blocks", 1024, 4096, 6144): None,
    ("blocks", 4096, 4096, 6144): None,
    ("blocks", 128, 4096, 4096): ScaledConfig(block_m=64, block_n=64, warps=4, stages=6),
    ("blocks", 256, 4096, 4096): ScaledConfig(block_m=128, block_n=64, warps=4),
    ("blocks", 512, 4096, 4096): None,
    ("blocks", 1024, 4096, 4096): None,
    ("blocks", 4096, 4096, 4096): None,
    ("blocks", 128, 4096, 28672): None,
    ("blocks", 256, 4096, 28672): None,
    ("blocks", 512, 4096, 28672): None,
    ("blocks", 1024, 4096, 28672): None,
    ("blocks", 4096, 4096, 28672): None,
    ("blocks", 128, 14336, 4096): ScaledConfig(block_m=64, block_n=64, warps=4, stages=6),
    ("blocks", 256, 14336, 4096): None,
    ("blocks", 512, 14336, 4096): None,
    ("blocks", 1024, 14336, 4096): None,
    ("blocks", 4096, 14336, 4096): None,
}


def choose(kind: Kind, rows: int, k: int, n: int, has_library: bool) -> ScaledConfig | None:
    """The kernel for x [rows, k] and a weight [n, k]; None: the library's, which must be there then."""
    bucket = bucket_of(rows)
    by_rule = None if has_library and kind == "blocks" else candidates(kind, bucket)[0]
    found = MEASURED.get((kind, bucket, k, n), by_rule)
    return found if found is not None or has_library else candidates(kind, bucket)[0]


def bucket_of(rows: int) -> int:
    return next((b for b in BUCKETS if b >= rows), BUCKETS[-1])


def candidates(kind: Kind, rows: int) -> list[ScaledConfig]:
    """Worth measuring, the likely one first. Blocks keep two tiles of sums in registers, of one group and of all, so
    that their tiles are smaller; several programs on a multiprocessor multiply while one adds them up."""
    if rows <= 128:
        return [
            ScaledConfig(64, 128, warps=4, stages=4),
            ScaledConfig(128, 64, warps=4, stages=4),
            ScaledConfig(64, 64, warps=4, stages=6),
            ScaledConfig(128, 128),
            ScaledConfig(64, 128, warps=4, stages=4, tma=False),
        ]
    if rows <= 512 or kind == "blocks":
        return [
            ScaledConfig(64, 128, warps=4, stages=3),
            ScaledConfig(128, 128),
            ScaledConfig(128, 128, stages=3),
            ScaledConfig(128, 64, warps=4, stages=4),
            ScaledConfig(64, 256),
            ScaledConfig(64, 128, warps=4, stages=3, tma=False),
        ]
    return [
        ScaledConfig(128, 256, stages=4),
        ScaledConfig(128, 128, stages=3),
        ScaledConfig(128, 256, stages=3),
        ScaledConfig(256, 128, stages=4),
        ScaledConfig(128, 256, stages=3, tma=False),
    ]
