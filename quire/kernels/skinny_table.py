"""The choice of kernel for few rows times a weight: measured for known shapes, by rule for others.

`benchmarks/gpu/linear.py` measures every candidate and prints the lines of MEASURED.
"""

from dataclasses import dataclass, replace
from typing import Literal

MAX_GEMV_ROWS = 4
MAX_FUSED_ROWS = 2
MAX_DOT_ROWS = 64
BUCKETS = (1, 2, 4, 8, 16, 32, 64)
MAX_ACCUMULATORS = 128  # registers of a thread
PROGRAMS = 132  # multiprocessors of an H100 or H200


@dataclass(frozen=True)
class SkinnyConfig:
    kind: Literal["gemv", "dot"]
    block_n: int  # output columns of a program
    block_k: int  # inputs it reads at a time
    warps: int = 4
    stages: int = 1  # of loads in flight through shared memory
    splits: int = 1  # programs that share the inputs of one tile


# (bytes per weight, rows, inputs, outputs) -> kernel; None: the library. Rows are the bucket's upper end.
# On an H200; by the model whose shape it is.
MEASURED: dict[tuple[int, int, int, int], SkinnyConfig | None] = {
    (2, 1, 1024, 4096): SkinnyConfig("gemv", 8, 1024),
    (2, 2, 1024, 4096): None,
    (2, 4, 1024, 4096): None,
    (2, 8, 1024, 4096): None,
    (2, 16, 1024, 4096): None,
    (2, 32, 1024, 4096): None,
    (2, 64, 1024, 4096): None,
    (1, 1, 1024, 4096): SkinnyConfig("gemv", 16, 1024),
    (1, 2, 1024, 4096): SkinnyConfig("gemv", 16, 1024),
    (1, 4, 1024, 4096): SkinnyConfig("gemv", 16, 1024),
    (1, 8, 1024, 4096): SkinnyConfig("dot", 64, 256, stages=4, splits=2),
    (1, 16, 1024, 4096): SkinnyConfig("dot", 64, 256, stages=4, splits=2),
    (1, 32, 1024, 4096): SkinnyConfig("dot", 64, 256, stages=4, splits=2),
    (1, 64, 1024, 4096): SkinnyConfig("dot", 64, 256, stages=6, splits=2),
    (2, 1, 2048, 1024): SkinnyConfig("gemv", 4, 2048),
    (2, 2, 2048, 1024): SkinnyConfig("gemv", 4, 2048),
    (2, 4, 2048, 1024): SkinnyConfig("gemv", 4, 2048),
    (2, 8, 2048, 1024): SkinnyConfig("dot", 64, 128, stages=4, splits=8),
    (2, 16, 2048, 1024): SkinnyConfig("dot", 64, 128, stages=4, splits=8),
    (2, 32, 2048, 1024): None,
    (2, 64, 2048, 1024): None,
    (1, 1, 2048, 1024): SkinnyConfig("gemv", 8, 2048),
    (1, 2, 2048, 1024): SkinnyConfig("gemv", 8, 2048),
    (1, 4, 2048, 1024): SkinnyConfig("gemv", 8, 2048),
    (1, 8, 2048, 1024): SkinnyConfig("dot", 64, 256, stages=6, splits=4),
    (1, 16, 2048, 1024): SkinnyConfig("dot", 64, 256, stages=4, splits=4),
    (1, 32, 2048, 1024): SkinnyConfig("dot", 64, 256, stages=6, splits=4),
    (1, 64, 2048, 1024): SkinnyConfig("dot", 64, 256, stages=4, splits=4),
    (2, 1, 1024, 6144): SkinnyConfig("gemv", 8, 1024),
    (2, 2, 1024, 6144): None,
    (2, 4, 1024, 6144): None,
    (2, 8, 1024, 6144): None,
    (2, 16, 1024, 6144): SkinnyConfig("dot", 64, 128, stages=6),
    (2, 32, 1024, 6144): SkinnyConfig("dot", 64, 128, stages=6),
    (2, 64, 1024, 6144): None,
    (1, 1, 1024, 6144): SkinnyConfig("gemv", 16, 1024),
    (1, 2, 1024, 6144): SkinnyConfig("gemv", 16, 1024),
    (1, 4, 1024, 6144): SkinnyConfig("dot", 64, 256, stages=6),
    (1, 8, 1024, 6144): SkinnyConfig("dot", 64, 256, stages=6),
    (1, 16, 1024, 6144): SkinnyConfig("dot", 64, 256, stages=6),
    (1, 32, 1024, 6144): SkinnyConfig("dot", 64, 256, stages=6),
    (1, 64, 1024, 6144): SkinnyConfig("dot", 64, 256, stages=6),
    (2, 1, 3072, 1024): SkinnyConfig("gemv", 2, 1024),
    (2, 2, 3072, 1024): SkinnyConfig("gemv", 2, 1024),
    (2, 4, 3072, 1024): SkinnyConfig("gemv", 4, 1024),
    (2, 8, 3072, 1024): SkinnyConfig("dot", 64, 128, stages=6, splits=8),
    (2, 16, 3072, 1024): SkinnyConfig("dot", 64, 128, stages=6, splits=8),
    (2, 32, 3072, 1024): SkinnyConfig("dot", 64, 128, stages=6, splits=8),
    (2, 64, 3072, 1024): None,
    (1, 1, 3072, 1024): SkinnyConfig("gemv", 4, 4096, warps=8),
    (1, 2, 3072, 1024): SkinnyConfig("gemv", 4, 2048, stages=4),
    (1, 4, 3072, 1024): SkinnyConfig("dot", 64, 256, stages=6, splits=6),
    (1, 8, 3072, 1024): SkinnyConfig("dot", 64, 256, stages=4, splits=6),
    (1, 16, 3072, 1024): SkinnyConfig("dot", 64, 256, stages=6, splits=6),
    (1, 32, 3072, 1024): SkinnyConfig("dot", 64, 256, stages=6, splits=6),
    (1, 64, 3072, 1024): SkinnyConfig("dot", 64, 256, stages=6, splits=6),
    (2, 1, 1024, 151936): SkinnyConfig("gemv", 8, 1024),
    (2, 2, 1024, 151936): SkinnyConfig("gemv", 16, 1024),
    (2, 4, 1024, 151936): None,
    (2, 8, 1024, 151936): SkinnyConfig("dot", 128, 128, stages=4),
    (2, 16, 1024, 151936): SkinnyConfig("dot", 64, 128, stages=4),
    (2, 32, 1024, 151936): SkinnyConfig("dot", 64, 128, stages=4),
    (2, 64, 1024, 151936): None,
    (2, 1, 4096, 6144): SkinnyConfig("gemv", 4, 4096, warps=8),
    (2, 2, 4096, 6144): SkinnyConfig("gemv", 4, 4096, warps=8),
    (2, 4, 4096, 6144): None,
    (2, 8, 4096, 6144): None,
    (2, 16, 4096, 6144): SkinnyConfig("dot", 64, 128, stages=6),
    (2, 32, 4096, 6144): SkinnyConfig("dot", 64, 128, stages=6),
    (2, 64, 4096, 6144): SkinnyConfig("dot", 64, 128, stages=6),
    (1, 1, 4096, 6144): SkinnyConfig("gemv", 4, 4096),
    (1, 2, 4096, 6144): SkinnyConfig("dot", 64, 256, stages=6),
    (1, 4, 4096, 6144): SkinnyConfig("dot", 64, 256, stages=6),
    (1, 8, 4096, 6144): SkinnyConfig("dot", 64, 256, stages=6),
    (1, 16, 4096, 6144): SkinnyConfig("dot", 64, 256, stages=6),
    (1, 32, 4096, 6144): SkinnyConfig("dot", 64, 256, stages=6),
    (1, 64, 4096, 6144): SkinnyConfig("dot", 64, 256, stages=6),
    (2, 1, 4096, 4096): SkinnyConfig("gemv", 4, 4096),
    (2, 2, 4096, 4096): SkinnyConfig("gemv", 4, 4096, warps=8),
    (2, 4, 4096, 4096): SkinnyConfig("dot", 64, 128, stages=4, splits=4),
    (2, 8, 4096, 4096): SkinnyConfig("dot", 64, 128, stages=6, splits=2),
    (2, 16, 4096, 4096): SkinnyConfig("dot", 64, 128, stages=6, splits=2),
    (2, 32, 4096, 4096): SkinnyConfig("dot", 64, 128, stages=6, splits=2),
    (2, 64, 4096, 4096): None,
    (1, 1, 4096, 4096): SkinnyConfig("gemv", 4, 4096),
    (1, 2, 4096, 4096): SkinnyConfig("gemv", 4, 4096),
    (1, 4, 4096, 4096): SkinnyConfig("dot", 64, 256, stages=6, splits=2),
    (1, 8, 4096, 4096): SkinnyConfig("dot", 64, 256, stages=6, splits=2),
    (1, 16, 4096, 4096): SkinnyConfig("dot", 64, 256, stages=6, splits=2),
    (1, 32, 4096, 4096): SkinnyConfig("dot", 64, 256, stages=6, splits=2),
    (1, 64, 4096, 4096): SkinnyConfig("dot", 64, 256, stages=6, splits=2),
    (2, 1, 4096, 28672): SkinnyConfig("gemv", 4, 4096, warps=8),
    (2, 2, 4096, 28672): SkinnyConfig("gemv", 4, 4096, warps=8),
    (2, 4, 4096, 28672): None,
    (2, 8, 4096, 28672): None,
    (2, 16, 4096, 28672): None,
    (2, 32, 4096, 28672): None,
    (2, 64, 4096, 28672): None,
    (1, 1, 4096, 28672): SkinnyConfig("gemv", 4, 4096),
    (1, 2, 4096, 28672): SkinnyConfig("dot", 128, 256, stages=4),
    (1, 4, 4096, 28672): SkinnyConfig("dot", 128, 256, stages=4),
    (1, 8, 4096, 28672): SkinnyConfig("dot", 128, 256, stages=4),
    (1, 16, 4096, 28672): SkinnyConfig("dot", 64, 256, stages=4),
    (1, 32, 4096, 28672): SkinnyConfig("dot", 64, 256, stages=4),
    (1, 64, 4096, 28672): None,
    (2, 1, 14336, 4096): None,
    (2, 2, 14336, 4096): None,
    (2, 4, 14336, 4096): None,
    (2, 8, 14336, 4096): None,
    (2, 16, 14336, 4096): None,
    (2, 32, 14336, 4096): None,
    (2, 64, 14336, 4096): None,
    (1, 1, 14336, 4096): SkinnyConfig("gemv", 2, 2048),
    (1, 2, 14336, 4096): SkinnyConfig("dot", 64, 256, stages=6, splits=2),
    (1, 4, 14336, 4096): SkinnyConfig("dot", 64, 256, stages=6, splits=2),
    (1, 8, 14336, 4096): SkinnyConfig("dot", 64, 256, stages=6, splits=2),
    (1, 16, 14336, 4096): SkinnyConfig("dot", 64, 256, stages=6, splits=2),
    (1, 32, 14336, 4096): SkinnyConfig("dot", 64, 256, stages=6, splits=2),
    (1, 64, 14336, 4096): SkinnyConfig("dot", 64, 256, stages=6, splits=2),
    (2, 1, 4096, 128256): SkinnyConfig("gemv", 4, 4096, warps=8),
    (2, 2, 4096, 128256): SkinnyConfig("dot", 128, 128, stages=4),
    (2, 4, 4096, 128256): SkinnyConfig("dot", 128, 128, stages=4),
    (2, 8, 4096, 128256): SkinnyConfig("dot", 128, 128, stages=4),
    (2, 16, 4096, 128256): SkinnyConfig("dot", 128, 128, stages=4),
    (2, 32, 4096, 128256): SkinnyConfig("dot", 128, 128, stages=4),
    (2, 64, 4096, 128256): SkinnyConfig("dot", 128, 128, stages=4),
    (2, 1, 2880, 5120): SkinnyConfig("gemv", 2, 1024),
    (2, 2, 2880, 5120): None,
    (2, 4, 2880, 5120): None,
    (2, 8, 2880, 5120): None,
    (2, 16, 2880, 5120): None,
    (2, 32, 2880, 5120): None,
    (2, 64, 2880, 5120): None,
    (2, 1, 4096, 2880): SkinnyConfig("gemv", 2, 4096),
    (2, 2, 4096, 2880): SkinnyConfig("gemv", 4, 4096),
    (2, 4, 4096, 2880): SkinnyConfig("gemv", 2, 4096),
    (2, 8, 4096, 2880): SkinnyConfig("dot", 64, 128, stages=6, splits=2),
    (2, 16, 4096, 2880): SkinnyConfig("dot", 64, 128, stages=6, splits=2),
    (2, 32, 4096, 2880): SkinnyConfig("dot", 64, 128, stages=6, splits=2),
    (2, 64, 4096, 2880): None,
    (2, 1, 2880, 201088): SkinnyConfig("gemv", 4, 1024),
    (2, 2, 2880, 201088): None,
    (2, 4, 2880, 201088): None,
    (2, 8, 2880, 201088): None,
    (2, 16, 2880, 201088): None,
    (2, 32, 2880, 201088): None,
    (2, 64, 2880, 201088): SkinnyConfig("dot", 128, 128, stages=4),
}


def choose(itemsize: int, rows: int, k: int, n: int) -> SkinnyConfig | None:
    """The kernel for x [rows, k] and a weight [n, k] of `itemsize` bytes per element; None: leave it to the library."""
    if not 0 < rows <= MAX_DOT_ROWS or k % 16:
        return None
    bucket = next(b for b in BUCKETS if b >= rows)
    if (itemsize, bucket, k, n) in MEASURED:
        return MEASURED[itemsize, bucket, k, n]
    if bucket <= (MAX_GEMV_ROWS if itemsize == 2 else 2):
        return gemv_candidates(itemsize, bucket, k)[0]
    # The library fills the device by itself when there are many outputs, but is slow in fp8 at every size.
    return dot_candidates(itemsize, bucket, k, n)[0] if itemsize == 1 or n <= 8192 else None


def choose_fused(itemsize: int, rows: int, k: int, n: int) -> SkinnyConfig:
    """The kernel fused with norm, activation and residual: it may be slower by itself, but saves other launches."""
    measured = MEASURED.get((itemsize, rows, k, n))
    return measured if measured is not None and measured.kind == "gemv" else gemv_candidates(itemsize, rows, k)[0]


def for_groups(config: SkinnyConfig, groups: tuple[int, int]) -> SkinnyConfig:
    """The kernel for a weight with a scale per group of outputs and inputs: a tile is of one group of outputs, and a
    step of `dot` of one group of inputs."""
    block_n = min(config.block_n, groups[0])
    if config.kind == "gemv":
        return replace(config, block_n=block_n, block_k=max(config.block_k, groups[1]))
    block_k = min(config.block_k, groups[1])
    return replace(config, block_n=block_n, block_k=block_k, stages=min(8, config.stages * config.block_k // block_k))


def candidates(itemsize: int, rows: int, k: int, n: int) -> list[SkinnyConfig]:
    """Candidates to measure."""
    gemv = gemv_candidates(itemsize, rows, k) if rows <= MAX_GEMV_ROWS else []
    return gemv + dot_candidates(itemsize, rows, k, n)


def gemv_candidates(itemsize: int, rows: int, k: int) -> list[SkinnyConfig]:
    row = k * itemsize
    if k & (k - 1) == 0 and 1024 <= row <= 8192:
        # Whole rows in one step: 16 KiB for 4 warps is eight 16-byte loads in flight per thread.
        tried = [SkinnyConfig("gemv", 16384 // row, k), SkinnyConfig("gemv", 32768 // row, k, warps=8)]
        if itemsize == 2 or rows == 1:  # twice the weights in as many bytes: more rows would spill
            tried.append(SkinnyConfig("gemv", 32768 // row, k))
        return tried
    step = 2048 // itemsize
    tried = [
        SkinnyConfig("gemv", 4, step),
        SkinnyConfig("gemv", 8, step),
        SkinnyConfig("gemv", 4, 2 * step, warps=8),
        SkinnyConfig("gemv", 4, step, stages=4),
        SkinnyConfig("gemv", 2, step),
    ]
    # A loop keeps an accumulator per row and weight of the tile; more of them would spill.
    return [c for c in tried if rows * c.block_n * c.block_k <= MAX_ACCUMULATORS * 32 * c.warps]


def dot_candidates(itemsize: int, rows: int, k: int, n: int) -> list[SkinnyConfig]:
    step = 256 // itemsize
    found: dict[SkinnyConfig, None] = {}
    for block_n, stages, per_sm in ((64, 4, 2), (64, 4, 4), (128, 4, 1), (64, 6, 1)):
        tiles = -(-n // block_n)
        # Shorter pieces than two steps are all prologue.
        splits = max(1, min(per_sm * PROGRAMS // tiles, k // (2 * step), 16))
        found[SkinnyConfig("dot", block_n, step, stages=stages, splits=splits)] = None
    return list(found)
