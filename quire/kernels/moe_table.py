"""The choice of kernels for rows times their experts: measured for known models, by rule for others.

`benchmarks/gpu/moe.py` measures every candidate and prints the lines of MEASURED.
"""

from dataclasses import dataclass

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384)
MAX_EXPERTS = 1024
MAX_FUSED_ROWS = 16  # for the layer fused with norm, router and residual
MAX_FEW_PAIRS = 64  # pairs of row and expert up to which no sorting is faster, unless measured otherwise
ELEMENTS = 8192  # that four warps hold of a tile of weights, in 16-byte loads all in flight


@dataclass(frozen=True)
class SlabConfig:
    """A program of the few-row kernels. Tiles of weights stay in registers."""

    block_n: int  # output columns of a program
    block_k: int  # inputs it reads at a time
    warps: int = 4
    stages: int = 1  # of loads in flight through shared memory


@dataclass(frozen=True)
class FewConfig:
    gate_up: SlabConfig
    down: SlabConfig


@dataclass(frozen=True)
class TileConfig:
    """A program of the many-row kernels: a tile of pairs by a tile of outputs."""

    block_n: int
    block_k: int
    warps: int = 4
    stages: int = 4
    tma: bool = True  # weights through the tensor memory accelerator


@dataclass(frozen=True)
class GroupedConfig:
    block_m: int  # pairs of a tile
    gate_up: TileConfig
    down: TileConfig


MoeConfig = FewConfig | GroupedConfig
Shape = tuple[int, int, int, int]  # experts, of which chosen, hidden size, intermediate size

# (rows, experts, chosen, hidden size, intermediate size) -> kernels. Rows are the bucket's upper end.
MEASURED: dict[tuple[int, int, int, int, int], MoeConfig] = {
    # Qwen3-30B-A3B on an H200
    (1, 128, 8, 2048, 768): FewConfig(SlabConfig(4, 2048), SlabConfig(8, 256, warps=8)),
    (2, 128, 8, 2048, 768): FewConfig(SlabConfig(4, 2048), SlabConfig(8, 256, warps=8)),
    (4, 128, 8, 2048, 768): FewConfig(SlabConfig(4, 2048), SlabConfig(4, 256, stages=3)),
    (8, 128, 8, 2048, 768): GroupedConfig(16, TileConfig(64, 128), TileConfig(128, 64)),
    (16, 128, 8, 2048, 768): GroupedConfig(16, TileConfig(64, 128), TileConfig(128, 128, stages=3)),
    (32, 128, 8, 2048, 768): GroupedConfig(16, TileConfig(64, 128), TileConfig(128, 128, stages=3)),
    (64, 128, 8, 2048, 768): GroupedConfig(16, TileConfig(64, 128, stages=3, tma=False), TileConfig(64, 128, stages=3)),
    (128, 128, 8, 2048, 768): GroupedConfig(16, TileConfig(64, 128, stages=3), TileConfig(128, 128, stages=3)),
    (256, 128, 8, 2048, 768): GroupedConfig(32, TileConfig(64, 128), TileConfig(128, 64)),
    (512, 128, 8, 2048, 768): GroupedConfig(64, TileConfig(128, 64, warps=8), TileConfig(128, 64, warps=8, tma=False)),
    (1024, 128, 8, 2048, 768): GroupedConfig(64, TileConfig(128, 64, warps=8), TileConfig(128, 64, stages=3)),
    (4096, 128, 8, 2048, 768): GroupedConfig(128, TileConfig(128, 64, warps=8), TileConfig(128, 64, warps=8, stages=3)),
    (16384, 128, 8, 2048, 768): GroupedConfig(128, TileConfig(128, 64, warps=8), TileConfig(128, 64, stages=3)),
    # DeepSeek-V2-Lite: every row has two of the experts, most others few rows
    (64, 66, 8, 2048, 1408): GroupedConfig(16, TileConfig(64, 128, stages=3), TileConfig(128, 128, stages=3)),
    (128, 66, 8, 2048, 1408): GroupedConfig(32, TileConfig(128, 64, stages=3), TileConfig(64, 128, stages=3)),
    (256, 66, 8, 2048, 1408): GroupedConfig(64, TileConfig(128, 64, warps=8), TileConfig(128, 64, stages=3)),
}


# IEEE float32 has no matrix instructions: tiles that sums and inputs fit registers with. For parity, not for speed.
FLOAT32 = GroupedConfig(32, TileConfig(32, 64, stages=3), TileConfig(64, 64, stages=3))


# For any number of rows, with --batch-invariant.
INVARIANT = GroupedConfig(16, TileConfig(64, 128, stages=3), TileConfig(128, 64))


def choose(rows: int, shape: Shape, itemsize: int = 2) -> MoeConfig:
    """For weights of `itemsize` bytes per element."""
    bucket = next((b for b in BUCKETS if b >= rows), BUCKETS[-1])
    measured = MEASURED.get((bucket, *shape))
    if measured is not None and itemsize == 2:
        return measured
    _, top_k, hidden, width = shape
    if bucket * top_k <= MAX_FEW_PAIRS:
        return FewConfig(gate_up_slabs(hidden)[0], down_slabs(top_k, width)[0])
    if itemsize == 4:
        return FLOAT32
    block_m = tile_heights(bucket, shape)[0]
    return GroupedConfig(block_m, tile_candidates(block_m, True)[0], tile_candidates(block_m, False)[0])


def max_fused_rows(shape: Shape) -> int:
    """The most rows for which the fused layer is faster than sorting."""
    return max((b for b in BUCKETS if b <= MAX_FUSED_ROWS and isinstance(choose(b, shape), FewConfig)), default=0)


def choose_few(rows: int, shape: Shape) -> FewConfig:
    """For the fused layer: sorting may be faster by itself, but cannot be fused with norm, router and residual."""
    bucket = next(b for b in BUCKETS if b >= rows)
    measured = MEASURED.get((bucket, *shape))
    if isinstance(measured, FewConfig):
        return measured
    _, top_k, hidden, width = shape
    return FewConfig(gate_up_slabs(hidden)[0], down_slabs(top_k, width)[0])


def gate_up_slabs(hidden: int) -> list[SlabConfig]:
    """Two tiles, gate and up, each with half of ELEMENTS."""
    if hidden & (hidden - 1) == 0 and 512 <= hidden <= 4096:
        # Whole rows in one step.
        n = max(1, ELEMENTS // hidden)
        return [
            SlabConfig(n, hidden),
            SlabConfig(2 * n, hidden, warps=8),
            SlabConfig(max(1, n // 2), hidden),
            SlabConfig(n, hidden, warps=8),
            SlabConfig(4, 512),
            SlabConfig(8, 512, stages=3),
        ]
    step = _largest_step(hidden, 1024)
    n = max(1, 4096 // step)
    return [
        SlabConfig(n, step),
        SlabConfig(2 * n, step),
        SlabConfig(2 * n, step, warps=8),
        SlabConfig(n, step, stages=3),
    ]


def down_slabs(top_k: int, width: int) -> list[SlabConfig]:
    """A tile has a row for each expert and output column."""
    step = _largest_step(width, 512)
    j = 1 << (top_k - 1).bit_length()
    n = max(1, ELEMENTS // (j * step))
    return [
        SlabConfig(n, step),
        SlabConfig(2 * n, step, warps=8),
        SlabConfig(max(1, n // 2), step),
        SlabConfig(n, step, warps=8),
        SlabConfig(n, step, stages=3),
        SlabConfig(2 * n, step),
        SlabConfig(max(1, n // 2), 2 * step),
    ]


def _largest_step(size: int, limit: int) -> int:
    """The largest power of two up to `limit` that divides size, if it is at least 128."""
    step = size & -size
    return min(step, limit) if step >= 128 else min(limit, 1 << (size - 1).bit_length())


def tile_heights(rows: int, shape: Shape) -> list[int]:
    """Sizes of tiles worth measuring, the likely one first: half as many again as an expert gets on average."""
    num_experts, top_k, _, _ = shape
    each = rows * top_k / num_experts
    likely = next((m for m in (16, 32, 64, 128) if m >= 1.5 * each), 128)
    near = [m for m in (16, 32, 64, 128) if likely / 2 <= m <= likely * 2]
    return sorted(near, key=lambda m: (m != likely, m))


def tile_candidates(block_m: int, is_gate_up: bool) -> list[TileConfig]:
    """Worth measuring, the likely one first. gate_up has two tiles of weights and of sums beside each other."""
    if block_m <= 32:  # bound by reading weights: several programs side by side hide each other's start
        if is_gate_up:
            return [
                TileConfig(64, 64),
                TileConfig(64, 128, stages=3),
                TileConfig(64, 128),
                TileConfig(64, 128, stages=3, tma=False),
                TileConfig(64, 64, stages=6),
                TileConfig(128, 64, stages=3),
            ]
        return [
            TileConfig(128, 64),
            TileConfig(64, 128, stages=3),
            TileConfig(128, 128, stages=3),
            TileConfig(128, 64, tma=False),
            TileConfig(64, 128),
            TileConfig(256, 64, stages=3),
        ]
    if block_m == 64:
        return [
            TileConfig(128, 64, warps=8),
            TileConfig(64, 64),
            TileConfig(64, 128, stages=3),
            TileConfig(128, 64, stages=3),
            TileConfig(128, 64, warps=8, tma=False),
        ]
    if is_gate_up:
        return [
            TileConfig(128, 64, warps=8),
            TileConfig(128, 64, warps=8, stages=3),
            TileConfig(64, 64, stages=3),
            TileConfig(64, 64, warps=8, stages=3),
            TileConfig(128, 64, warps=8, tma=False),
        ]
    return [
        TileConfig(128, 64, warps=8, stages=3),
        TileConfig(256, 64, warps=8),
        TileConfig(256, 64, warps=8, stages=3),
        TileConfig(128, 64, warps=8),
        TileConfig(128, 64, stages=3),
        TileConfig(128, 64, warps=8, stages=3, tma=False),
    ]
