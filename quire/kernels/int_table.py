"""The choice of kernel for rows times a weight of 4 or 8 bits: measured for known shapes, by rule for others.

`benchmarks/gpu/int_linear.py` measures every candidate and prints the lines of MEASURED.
"""

from dataclasses import dataclass, replace

from quire.kernels import moe_table
from quire.kernels.moe_table import FewConfig, GroupedConfig, MoeConfig, Shape, SlabConfig, TileConfig

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MAX_TILE_ROWS = 256  # above it the library multiplies by the dequantized weight, unless measured otherwise
MIN_BLOCK_M = 8  # columns of the smallest matrix instruction
MAX_BLOCK_M = 128
MAX_ROWS_PER_EXPERT = 256  # on average; above it experts are dequantized first, unless measured otherwise
PROGRAMS = 132  # multiprocessors of an H100 or H200
SHORT_CHUNK = 128  # inputs; up to it, as with groups of 32 or fewer, more chunks must be in flight


@dataclass(frozen=True)
class IntConfig:
    block_n: int  # output columns of a program
    warps: int = 4
    stages: int = 4  # of chunks in flight through shared memory
    splits: int = 1  # programs that share the inputs of one tile
    block_m: int = 0  # rows of a program; 0: all, rounded up to a power of two
    sub: int = 0  # inputs of a plane that are read at a time; 0: all
    prescaled: bool = False  # scale weights rather than sums
    norm_apart: bool = False  # where it is fused with an RMSNorm: by a kernel of its own before it


# (bits, rows, inputs, outputs) -> kernel; None: dequantize, then the library. Rows are the bucket's upper end.
MEASURED: dict[tuple[int, int, int, int], IntConfig | None] = {
    (4, 1, 4096, 6144): IntConfig(64, splits=4),
    (4, 2, 4096, 6144): IntConfig(64, splits=4),
    (4, 4, 4096, 6144): IntConfig(64, splits=4),
    (4, 8, 4096, 6144): IntConfig(64, splits=4),
    (4, 16, 4096, 6144): IntConfig(32, warps=2, splits=2),
    (4, 32, 4096, 6144): IntConfig(64, splits=2, sub=64, prescaled=True),
    (4, 64, 4096, 6144): IntConfig(128, warps=8, stages=3, splits=2, sub=64, prescaled=True),
    (4, 128, 4096, 6144): IntConfig(128, warps=8, stages=3, block_m=64, sub=64, prescaled=True),
    (4, 256, 4096, 6144): None,
    (4, 512, 4096, 6144): None,
    (4, 1, 4096, 4096): IntConfig(32, warps=2, splits=4),
    (4, 2, 4096, 4096): IntConfig(32, warps=2, splits=4),
    (4, 4, 4096, 4096): IntConfig(32, warps=2, splits=4),
    (4, 8, 4096, 4096): IntConfig(32, warps=2, splits=4),
    (4, 16, 4096, 4096): IntConfig(64, stages=3, splits=4),
    (4, 32, 4096, 4096): IntConfig(64, splits=4, sub=64, prescaled=True),
    (4, 64, 4096, 4096): IntConfig(128, warps=8, stages=2, splits=4),
    (4, 128, 4096, 4096): IntConfig(128, warps=8, stages=3, splits=2, block_m=64, sub=64, prescaled=True),
    (4, 256, 4096, 4096): None,
    (4, 512, 4096, 4096): None,
    (4, 1, 4096, 28672): IntConfig(128, stages=3),
    (4, 2, 4096, 28672): IntConfig(128, stages=3),
    (4, 4, 4096, 28672): IntConfig(128, stages=3),
    (4, 8, 4096, 28672): IntConfig(128, stages=3),
    (4, 16, 4096, 28672): IntConfig(64, stages=3),
    (4, 32, 4096, 28672): IntConfig(256, warps=8, sub=64, prescaled=True),
    (4, 64, 4096, 28672): IntConfig(256, warps=8, sub=64, prescaled=True),
    (4, 128, 4096, 28672): IntConfig(256, warps=8, block_m=128, sub=32, prescaled=True),
    (4, 256, 4096, 28672): IntConfig(256, warps=8, block_m=128, sub=32, prescaled=True),
    (4, 512, 4096, 28672): None,
    (4, 1, 14336, 4096): IntConfig(32, warps=2, splits=4),
    (4, 2, 14336, 4096): IntConfig(32, warps=2, splits=4),
    (4, 4, 14336, 4096): IntConfig(32, warps=2, splits=4),
    (4, 8, 14336, 4096): IntConfig(32, warps=2, splits=4),
    (4, 16, 14336, 4096): IntConfig(128, warps=8, stages=3, splits=4),
    (4, 32, 14336, 4096): IntConfig(64, splits=4, sub=64, prescaled=True),
    (4, 64, 14336, 4096): IntConfig(128, warps=8, stages=3, splits=4, sub=64, prescaled=True),
    (4, 128, 14336, 4096): IntConfig(128, warps=8, splits=4, block_m=128, sub=32, prescaled=True),
    (4, 256, 14336, 4096): IntConfig(256, warps=16, splits=4, block_m=128, sub=32, prescaled=True),
    (4, 512, 14336, 4096): None,
}

# The same for kernels fused with norm, activation and residual; outputs are those after the activation.
MEASURED_FUSED: dict[tuple[int, int, int, int], IntConfig] = {
    (4, 1, 4096, 6144): IntConfig(64, splits=4, norm_apart=True),
    (4, 2, 4096, 6144): IntConfig(64, splits=4, norm_apart=True),
    (4, 1, 4096, 4096): IntConfig(32, warps=2, splits=4),
    (4, 2, 4096, 4096): IntConfig(32, warps=2, splits=4),
    (4, 1, 4096, 14336): IntConfig(64, stages=3, norm_apart=True),
    (4, 2, 4096, 14336): IntConfig(64, stages=3, norm_apart=True),
    (4, 1, 14336, 4096): IntConfig(32, warps=2, splits=4),
    (4, 2, 14336, 4096): IntConfig(32, warps=2, splits=4),
    (4, 1, 2048, 5120): IntConfig(64, stages=6, norm_apart=True),
    (4, 2, 2048, 5120): IntConfig(64, stages=6, norm_apart=True),
}

# The same for short chunks, which the key has behind the bits.
MEASURED_SHORT: dict[tuple[int, int, int, int, int], IntConfig | None] = {
    (4, 128, 1, 4096, 28672): IntConfig(64, warps=2, stages=8),
    (4, 128, 1, 14336, 4096): IntConfig(64, warps=2, stages=8, splits=8, prescaled=True),
}
MEASURED_SHORT_FUSED: dict[tuple[int, int, int, int, int], IntConfig] = {
    (4, 128, 1, 4096, 6144): IntConfig(32, warps=2, stages=6, splits=2, norm_apart=True),
    (4, 128, 1, 4096, 4096): IntConfig(128, stages=6, splits=12),
    (4, 128, 1, 4096, 14336): IntConfig(32, warps=2, stages=6, norm_apart=True),
    (4, 128, 1, 14336, 4096): IntConfig(64, warps=2, stages=8, splits=8, prescaled=True),
}


def choose(bits: int, rows: int, k: int, n: int, chunk: int) -> IntConfig | None:
    """The kernel for x [rows, k] and a weight [n, k] packed in chunks of that many inputs; None: dequantize first."""
    bucket = next((b for b in BUCKETS if b >= rows), None)
    if rows == 0 or bucket is None:
        return None
    if chunk <= SHORT_CHUNK:
        if (bits, chunk, bucket, k, n) in MEASURED_SHORT:
            return MEASURED_SHORT[bits, chunk, bucket, k, n]
    elif (bits, bucket, k, n) in MEASURED:
        return MEASURED[bits, bucket, k, n]
    return candidates(bucket, k, n, chunk)[0] if bucket <= MAX_TILE_ROWS else None


def choose_fused(bits: int, rows: int, k: int, n: int, chunk: int) -> IntConfig:
    """For a kernel fused with norm, activation and residual, of n outputs after the activation."""
    if chunk <= SHORT_CHUNK:
        measured = MEASURED_SHORT_FUSED.get((bits, chunk, rows, k, n))
    else:
        measured = MEASURED_FUSED.get((bits, rows, k, n))
    return measured or candidates(rows, k, n, chunk)[0]


def candidates(rows: int, k: int, n: int, chunk: int) -> list[IntConfig]:
    """Candidates to measure, the likeliest first."""
    # Output columns, warps, stages, programs on each multiprocessor; with weights scaled also rows, and `sub`.
    plain: list[tuple[int, int, int, int]] = []
    scaled: list[tuple[int, int, int, int, int, int]] = []
    if rows <= 16 and chunk <= SHORT_CHUNK:
        # Few warps for the columns: what a step costs beside its products is the same for any number of these.
        plain = [(64, 2, 6, 6), (64, 2, 8, 4), (64, 2, 6, 8), (128, 2, 6, 4), (128, 4, 6, 2), (128, 4, 6, 3)]
        plain += [(64, 4, 6, 4), (64, 4, 8, 2), (32, 2, 8, 8), (32, 2, 6, 4), (32, 1, 8, 8), (256, 4, 4, 2)]
        scaled = [(*shape, 0, 0) for shape in plain[:4]]
    elif rows <= 16:
        plain = [(64, 4, 4, 2), (64, 4, 4, 4), (64, 4, 3, 3), (128, 4, 3, 2), (128, 8, 3, 1), (64, 4, 6, 1)]
        plain += [(32, 2, 4, 4), (32, 2, 4, 8), (16, 1, 4, 8)]
    elif rows <= 64:
        # Sums that are scaled are held twice: more warps, or registers spill.
        scaled = [(64, 4, 4, 2, 0, 64), (128, 8, 3, 1, 0, 64), (128, 4, 4, 1, 0, 64), (64, 4, 3, 3, 0, 128)]
        scaled += [(256, 8, 4, 1, 0, 64), (256, 8, 4, 2, 0, 64), (256, 16, 4, 1, 0, 64), (128, 8, 4, 2, 0, 64)]
        plain = [(64, 4, 3, 2), (64, 8, 3, 2), (128, 8, 2, 1)]
    else:
        scaled = [(128, 8, 4, 1, 128, 32), (128, 8, 2, 1, 128, 64), (128, 8, 3, 1, 64, 64), (64, 4, 4, 2, 128, 32)]
        scaled += [(256, 8, 3, 1, 64, 64), (64, 4, 3, 2, 64, 64)]
        # Wide tiles read inputs less often: from the second-level cache, which is the limit.
        scaled += [
            (256, 8, 4, 1, 128, 32),
            (256, 16, 4, 1, 128, 32),
            (256, 16, 2, 1, 128, 64),
            (128, 16, 4, 1, 128, 32),
        ]
        if rows > 128:
            scaled += [(128, 8, 3, 1, 256, 32), (128, 16, 3, 1, 256, 32), (64, 8, 3, 1, 256, 32)]
    found = [replace(_config(rows, k, n, chunk, *c[:5]), sub=c[5], prescaled=True) for c in scaled]
    sums = [_config(rows, k, n, chunk, *shape, 0) for shape in plain]
    found = sums + found if rows <= 16 else found + sums
    return list(dict.fromkeys(found))


def _config(
    rows: int, k: int, n: int, chunk: int, block_n: int, warps: int, stages: int, per_sm: int, block_m: int
) -> IntConfig:
    """With enough splits for that many programs on each multiprocessor."""
    tiles = -(-n // block_n) * (-(-rows // block_m) if block_m else 1)
    # Shorter pieces than two chunks are all prologue.
    splits = max(1, min(per_sm * PROGRAMS // tiles, -(-k // chunk) // 2, 16))
    return IntConfig(block_n, warps, stages, splits, block_m)


# (bits, rows, experts, chosen, hidden size, intermediate size) -> kernels; None: dequantize, then those of moe_table.
# Tiles read whole chunks: no block_k.
MEASURED_EXPERTS: dict[tuple[int, int, int, int, int, int], MoeConfig | None] = {
    (4, 1, 128, 8, 2048, 768): FewConfig(SlabConfig(32, 0, warps=2, stages=3), SlabConfig(64, 0, stages=4)),
    (4, 2, 128, 8, 2048, 768): FewConfig(SlabConfig(32, 0, warps=2, stages=4), SlabConfig(32, 0, warps=2, stages=4)),
    (4, 4, 128, 8, 2048, 768): FewConfig(SlabConfig(32, 0, warps=2, stages=3), SlabConfig(128, 0, stages=3)),
    (4, 8, 128, 8, 2048, 768): FewConfig(SlabConfig(32, 0, warps=2, stages=3), SlabConfig(128, 0, stages=3)),
    (4, 16, 128, 8, 2048, 768): GroupedConfig(
        16, TileConfig(64, 0, stages=2, tma=False), TileConfig(64, 0, stages=2, tma=False)
    ),
    (4, 32, 128, 8, 2048, 768): GroupedConfig(
        16, TileConfig(64, 0, stages=2, tma=False), TileConfig(64, 0, stages=2, tma=False)
    ),
    (4, 64, 128, 8, 2048, 768): GroupedConfig(
        16, TileConfig(64, 0, stages=2, tma=False), TileConfig(64, 0, stages=2, tma=False)
    ),
    (4, 128, 128, 8, 2048, 768): GroupedConfig(
        16, TileConfig(64, 0, stages=2, tma=False), TileConfig(64, 0, tma=False)
    ),
    (4, 256, 128, 8, 2048, 768): GroupedConfig(
        16, TileConfig(64, 0, stages=2, tma=False), TileConfig(64, 0, stages=2, tma=False)
    ),
    (4, 512, 128, 8, 2048, 768): GroupedConfig(
        64, TileConfig(64, 0, stages=3, tma=False), TileConfig(128, 0, warps=8, stages=3, tma=False)
    ),
    (4, 1024, 128, 8, 2048, 768): GroupedConfig(
        64, TileConfig(64, 0, stages=3, tma=False), TileConfig(128, 0, warps=8, stages=3, tma=False)
    ),
    (4, 4096, 128, 8, 2048, 768): GroupedConfig(
        128, TileConfig(128, 0, warps=8, stages=3, tma=False), TileConfig(64, 0, stages=3, tma=False)
    ),
    (4, 1, 32, 4, 2880, 2880): FewConfig(SlabConfig(32, 0, warps=2, stages=4), SlabConfig(16, 0, warps=1, stages=4)),
    (4, 2, 32, 4, 2880, 2880): FewConfig(SlabConfig(32, 0, warps=2, stages=4), SlabConfig(16, 0, warps=1, stages=4)),
    (4, 4, 32, 4, 2880, 2880): FewConfig(SlabConfig(16, 0, warps=1, stages=4), SlabConfig(32, 0, warps=2, stages=4)),
    (4, 8, 32, 4, 2880, 2880): GroupedConfig(16, TileConfig(64, 0, tma=False), TileConfig(64, 0, tma=False)),
    (4, 16, 32, 4, 2880, 2880): GroupedConfig(16, TileConfig(64, 0, tma=False), TileConfig(64, 0, tma=False)),
    (4, 32, 32, 4, 2880, 2880): GroupedConfig(16, TileConfig(64, 0, tma=False), TileConfig(64, 0, tma=False)),
    (4, 64, 32, 4, 2880, 2880): GroupedConfig(16, TileConfig(64, 0, tma=False), TileConfig(64, 0, tma=False)),
    (4, 128, 32, 4, 2880, 2880): GroupedConfig(
        32, TileConfig(64, 0, stages=3, tma=False), TileConfig(64, 0, stages=3, tma=False)
    ),
    (4, 256, 32, 4, 2880, 2880): GroupedConfig(
        64, TileConfig(64, 0, stages=3, tma=False), TileConfig(128, 0, warps=8, stages=3, tma=False)
    ),
    (4, 512, 32, 4, 2880, 2880): GroupedConfig(
        64, TileConfig(64, 0, stages=3, tma=False), TileConfig(64, 0, stages=3, tma=False)
    ),
    (4, 1024, 32, 4, 2880, 2880): GroupedConfig(
        128, TileConfig(64, 0, stages=3, tma=False), TileConfig(128, 0, warps=8, stages=3, tma=False)
    ),
    (4, 4096, 32, 4, 2880, 2880): GroupedConfig(
        128, TileConfig(64, 0, stages=3, tma=False), TileConfig(128, 0, warps=8, stages=3, tma=False)
    ),
}


def choose_experts(bits: int, rows: int, shape: Shape) -> MoeConfig | None:
    bucket = next((b for b in moe_table.BUCKETS if b >= rows), moe_table.BUCKETS[-1])
    if (bits, bucket, *shape) in MEASURED_EXPERTS:
        return MEASURED_EXPERTS[bits, bucket, *shape]
    if bucket * shape[1] > MAX_ROWS_PER_EXPERT * shape[0]:
        return None
    if bucket * shape[1] <= moe_table.MAX_FEW_PAIRS:
        return few_candidates()[0]
    return grouped_candidates(bucket, shape)[0]


def choose_few_experts(bits: int, rows: int, shape: Shape) -> FewConfig:
    """For the layer fused with norm, router and residual."""
    bucket = next(b for b in moe_table.BUCKETS if b >= rows)
    measured = MEASURED_EXPERTS.get((bits, bucket, *shape))
    return measured if isinstance(measured, FewConfig) else few_candidates()[0]


def max_fused_rows(bits: int, shape: Shape) -> int:
    """The most rows for which the fused layer is faster than sorting."""
    rows = (b for b in moe_table.BUCKETS if b <= moe_table.MAX_FUSED_ROWS)
    return max((b for b in rows if isinstance(choose_experts(bits, b, shape), FewConfig)), default=0)


def few_candidates() -> list[FewConfig]:
    slabs = [(32, 2, 4), (64, 4, 4), (64, 4, 3), (32, 2, 3), (16, 1, 4), (128, 4, 3)]
    slabs += [(32, 2, 8), (64, 4, 8)]  # for short planes
    tiles = [SlabConfig(block_n, 0, warps=warps, stages=stages) for block_n, warps, stages in slabs]
    return [FewConfig(tile, tiles[0]) for tile in tiles] + [FewConfig(tiles[0], tile) for tile in tiles[1:]]


def grouped_candidates(rows: int, shape: Shape) -> list[GroupedConfig]:
    found = []
    for m in moe_table.tile_heights(rows, shape):
        sizes = [(64, 4, 3), (64, 8, 3), (128, 8, 3)] if m > 16 else [(64, 4, 4), (64, 4, 2), (64, 8, 3), (128, 8, 2)]
        tiles = [TileConfig(block_n, 0, warps=warps, stages=stages, tma=False) for block_n, warps, stages in sizes]
        found += [GroupedConfig(m, tile, tiles[0]) for tile in tiles]
        found += [GroupedConfig(m, tiles[0], tile) for tile in tiles[1:]]
    return found
