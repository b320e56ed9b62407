"""y = x W^T whose rows do not depend on one another: the order in which a row's products are added is the weight's.

Inputs fall into slabs by the weight's size alone. A slab is a chain of matrix instructions in the order of its inputs,
and slabs are added in order. All kernels here take the weight as the left operand of these instructions, of which a
row of x is a column on the right: how many columns there are does not change one of them.

`few` is for rows of a decode step: a program has all inputs of some outputs, and its slabs are rows of one tile.
`many` has slabs of large tiles one after the other, or a program for each.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.rms_norm import RMSNormParams
from quire.kernels.triton.skinny_linear import COUNTERS, WORKSPACE_FLOATS, SplitWorkspace, epilogue, prefetch

HEIGHT = 64  # rows of a matrix instruction's left operand
BLOCK_K = 64
MAX_SLABS = 8
FEW_COLUMNS = 32  # rows times slabs: beyond it `few` reads more of x than of the weight
FEW_STAGES = 5
NORM_ROWS = 16
ENOUGH = 256 * HEIGHT  # rows of tiles of `few`: about two programs for each multiprocessor of an H200
PROGRAMS = 132  # that an H200 runs at a time
STEP_MICROSECONDS = 0.35 / (128 * 128)  # of BLOCK_K inputs, by output of a tile
LOADED, MOVED = 60_000, 4_000_000  # bytes in a microsecond: by one program; sums to memory and back


@triton.jit
def _folded(sums, SLABS: tl.constexpr):
    """[.., slabs, rows] -> [.., rows], in order."""
    slab = tl.arange(0, SLABS)[None, :, None]
    total = tl.zeros([sums.shape[0], sums.shape[2]], tl.float32)
    for i in tl.static_range(SLABS):
        total += tl.sum(tl.where(slab == i, sums, 0.0), 1)  # of one and zeros: exact
    return total


@triton.jit
def _diagonal(product, row, column, SLABS: tl.constexpr):
    """[rows, (columns, slabs)], where only equal slabs meet in what is meant -> [rows, columns]."""
    own = tl.where((row % SLABS)[:, None] == (column % SLABS)[None, :], product, 0.0)
    return tl.sum(tl.reshape(own, [product.shape[0], product.shape[1] // SLABS, SLABS]), 2)


@triton.jit
def _half(sums, i: tl.constexpr, TOGETHER: tl.constexpr):
    """[2 * outputs, rows], where so many gates alternate with their ups -> [outputs, rows]."""
    both = tl.reshape(sums, [sums.shape[0] // (2 * TOGETHER), 2, TOGETHER, sums.shape[1]])
    one = tl.sum(tl.where(tl.arange(0, 2)[None, :, None, None] == i, both, 0.0), 1)
    return tl.reshape(one, [sums.shape[0] // 2, sums.shape[1]])


@triton.jit(do_not_specialize=["rows"])
def _few_kernel(
    x,  # [rows, K]
    w,  # [N, K], with SILU [2 * N, K]
    y,  # [rows, N]
    bias,
    residual,
    gain,  # [K] of an RMSNorm of x
    rows,
    K,
    N,
    x_stride,
    eps,
    SLABS: tl.constexpr,
    SLAB: tl.constexpr,  # inputs of one: a multiple of BLOCK_K
    OUTPUTS: tl.constexpr,  # of a program
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,  # slabs are of equal size
    LINES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    SILU: tl.constexpr,
    PDL: tl.constexpr,
):
    HEIGHT: tl.constexpr = (2 if SILU else 1) * OUTPUTS * SLABS
    first = tl.program_id(0) * OUTPUTS
    # Slabs of an output are next to each other, as are those of a row of x.
    row, column = tl.arange(0, HEIGHT), tl.arange(0, ROWS * SLABS)
    n = tl.minimum(first + row // SLABS % OUTPUTS, N - 1).to(tl.int64)
    if SILU:
        n += (row // (SLABS * OUTPUTS)) * N.to(tl.int64)
    w_rows = w + (n * K + row % SLABS * SLAB)[:, None]
    x_columns = x + (tl.minimum(column // SLABS, rows - 1).to(tl.int64) * x_stride + column % SLABS * SLAB)[None, :]
    if PDL:
        gdc_launch_dependents()
        if EVEN_K:
            prefetch(w_rows, 0, SLAB, LINES, 64)
        gdc_wait()
    acc = tl.zeros([HEIGHT, ROWS * SLABS], tl.float32)
    gram = tl.zeros([ROWS * SLABS, ROWS * SLABS], tl.float32)
    for start in tl.range(0, SLAB, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        if EVEN_K:
            left = tl.load(w_rows + k[None, :], eviction_policy="evict_first")
            right = tl.load(x_columns + k[:, None])
        else:
            left = tl.load(w_rows + k[None, :], mask=(row % SLABS * SLAB)[:, None] + k[None, :] < K, other=0.0)
            right = tl.load(x_columns + k[:, None], mask=(column % SLABS * SLAB)[None, :] + k[:, None] < K, other=0.0)
        if HAS_NORM:
            gram = tl.dot(tl.trans(right), right, gram, input_precision="ieee")
            at = (column % SLABS * SLAB)[None, :] + k[:, None]
            by_input = tl.load(gain + at) if EVEN_K else tl.load(gain + at, mask=at < K, other=0.0)
            right = (right.to(tl.float32) * by_input.to(tl.float32)).to(right.dtype)
        acc = tl.dot(left, right, acc, input_precision="ieee")
    sums = _diagonal(acc, row, column, SLABS)
    total = _folded(tl.reshape(sums, [HEIGHT // SLABS, SLABS, ROWS]), SLABS)
    m = tl.arange(0, ROWS)
    if HAS_NORM:
        own = tl.sum(tl.where(column[:, None] == column[None, :], gram, 0.0), 0)
        squares = tl.reshape(
            _folded(tl.reshape(tl.trans(tl.reshape(own, [ROWS, SLABS])), [1, SLABS, ROWS]), SLABS), [ROWS]
        )
        total *= tl.rsqrt(squares / K + eps)[None, :]
    up = total
    if SILU:
        up = _half(total, 1, OUTPUTS)
        total = _half(total, 0, OUTPUTS)
    n = first + tl.arange(0, OUTPUTS)
    epilogue(
        total, up, total, up, n[:, None], m[None, :], (m < rows)[None, :], y, bias, residual, bias, bias, N,
        HAS_BIAS, HAS_RESIDUAL, False, False, SILU, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    x,  # [rows, K]
    gain,  # [K]
    out,  # [rows, K]: x times gain
    scale,  # [rows] float32: by which products with `out` are those with the norm of x
    rows,
    K,
    x_stride,
    eps,
    SLABS: tl.constexpr,
    SLAB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (m < rows)[:, None]
    x_rows = x + tl.minimum(m, rows - 1).to(tl.int64)[:, None] * x_stride
    out_rows = out + m.to(tl.int64)[:, None] * K
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros([BLOCK_M, BLOCK_M], tl.float32)
    for slab in range(SLABS):
        gram = tl.zeros([BLOCK_M, BLOCK_M], tl.float32)
        for start in tl.range(slab * SLAB, (slab + 1) * SLAB, BLOCK_K, num_stages=STAGES):
            k = start + tl.arange(0, BLOCK_K)
            if EVEN_K:
                part = tl.load(x_rows + k[None, :])
                by_input = tl.load(gain + k)
            else:
                part = tl.load(x_rows + k[None, :], mask=(k < K)[None, :], other=0.0)
                by_input = tl.load(gain + k, mask=k < K, other=0.0)
            gram = tl.dot(part, tl.trans(part), gram, input_precision="ieee")
            scaled = part.to(tl.float32) * by_input.to(tl.float32)[None, :]
            tl.store(out_rows + k[None, :], scaled.to(part.dtype), mask=inside & (k < K)[None, :])
        total += gram
    i = tl.arange(0, BLOCK_M)
    squares = tl.sum(tl.where(i[:, None] == i[None, :], total, 0.0), 0)
    tl.store(scale + m, tl.rsqrt(squares / K + eps), mask=m < rows)


@triton.jit(do_not_specialize=["rows"])
def _many_kernel(
    x,  # [rows, K]
    w,  # [N, K], with SILU [2 * N, K]
    y,  # [rows, N]
    bias,
    residual,
    x_scale,  # [rows]
    partial,  # [tiles, slabs, BLOCK_M, BLOCK_N] float32
    arrived,  # [tiles] int32: zero before and after
    rows,
    K,
    N,
    x_stride,
    SLABS: tl.constexpr,
    SLAB: tl.constexpr,
    SPLIT: tl.constexpr,  # a program for each slab; else one adds all
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # rows of the weight: with SILU half of them are gates, eight of which are before their ups,
    # so that a thread has both
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    LINES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_X_SCALE: tl.constexpr,
    SILU: tl.constexpr,
    PDL: tl.constexpr,
):
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if SILU else BLOCK_N
    TOGETHER: tl.constexpr = 8
    # Neighbours share a tile of the weight.
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(1) * OUTPUTS
    row = tl.arange(0, BLOCK_N)
    # Rows and columns past the end read the last one again: cheaper than a mask, and never stored.
    n = tl.minimum(first + row, N - 1).to(tl.int64)
    if SILU:
        output = row // (2 * TOGETHER) * TOGETHER + row % TOGETHER
        n = tl.minimum(first + output, N - 1) + (row // TOGETHER % 2) * N.to(tl.int64)
    w_rows = w + n[:, None] * K
    x_rows = x + tl.minimum(m, rows - 1).to(tl.int64)[None, :] * x_stride
    begin = tl.program_id(2) * SLAB if SPLIT else 0
    end = tl.minimum(begin + SLAB, K) if SPLIT else K
    if PDL:
        gdc_launch_dependents()
        prefetch(w_rows, begin, K, LINES, 64)
        gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    total = acc
    for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        if EVEN_K:
            right = tl.load(x_rows + k[:, None])
            left = tl.load(w_rows + k[None, :])
        else:
            right = tl.load(x_rows + k[:, None], mask=(k < K)[:, None], other=0.0)
            left = tl.load(w_rows + k[None, :], mask=(k < K)[None, :], other=0.0)
        acc = tl.dot(left, right, acc, input_precision="ieee")
        if SLABS > 1 and not SPLIT:  # noqa: SIM102  (known to the compiler)
            if (start + BLOCK_K) % SLAB == 0 or start + BLOCK_K >= end:
                total += acc
                acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if SLABS == 1:
        total += acc
    if SPLIT:
        SIZE: tl.constexpr = BLOCK_N * BLOCK_M
        inside = (m < rows)[None, :]
        place = tl.arange(0, BLOCK_M)[None, :] * BLOCK_N + row[:, None]  # as y: stored in whole vectors
        sums = partial + tile.to(tl.int64) * (SLABS * SIZE) + place
        tl.store(sums + tl.program_id(2) * SIZE, acc, mask=inside)
        # Every thread's part must be written before one thread counts it as arrived.
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") != SLABS - 1:
            return
        tl.store(arrived + tile, 0)
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for slab in tl.range(SLABS):
            total += tl.load(sums + slab * SIZE, mask=inside, other=0.0, cache_modifier=".cg")
    up = total
    if SILU:
        up = _half(total, 1, TOGETHER)
        total = _half(total, 0, TOGETHER)
    n = first + tl.arange(0, OUTPUTS)
    epilogue(
        total, up, total, up, n[:, None], m[None, :], (m < rows)[None, :], y, bias, residual, bias, x_scale, N,
        HAS_BIAS, HAS_RESIDUAL, False, HAS_X_SCALE, SILU, False,
    )  # fmt: skip


@dataclass(frozen=True)
class Slabs:
    """How the inputs of a weight are divided."""

    count: int  # a power of two
    size: int

    @classmethod
    def of(cls, outputs: int, inputs: int) -> "Slabs":
        """None is shorter than four steps."""
        steps, count = triton.cdiv(inputs, BLOCK_K), 1
        while count < MAX_SLABS and outputs * count < ENOUGH and steps >= 8 * count:
            count *= 2
        return cls(count, triton.cdiv(steps, count) * BLOCK_K)

    def even(self, inputs: int) -> bool:
        return self.count * self.size == inputs


@dataclass(frozen=True)
class Tile:
    """Of many rows."""

    rows: int
    outputs: int
    warps: int
    stages: int

    def splits(self, tiles: int, slabs: Slabs) -> bool:
        """Whether a program for each slab is faster than one for all; an estimate, on which no result depends."""
        sums = tiles * slabs.count * self.rows * self.outputs
        if slabs.count == 1 or tiles > COUNTERS or sums > WORKSPACE_FLOATS:
            return False
        steps = slabs.size // BLOCK_K
        loaded = (self.rows + self.outputs) * BLOCK_K * 2
        step = max(STEP_MICROSECONDS * self.rows * self.outputs, loaded / LOADED)
        whole = triton.cdiv(tiles, PROGRAMS) * slabs.count * steps * step
        apart = triton.cdiv(tiles * slabs.count, PROGRAMS) * steps * step
        return whole > apart + 1 + 2 * 4 * sums / MOVED


def tile_for(rows: int, slabs: Slabs, dtype: torch.dtype) -> Tile:
    if dtype is torch.float32:
        return Tile(32, 32, 4, 2)
    if rows <= 64:
        return Tile(max(16, triton.next_power_of_2(rows)), 64 if rows <= 32 else 128, 4, 5)
    if rows <= 128 or slabs.count > 1:  # sums of a slab and of those before it: registers for both
        return Tile(64 if rows <= 64 else 128, 128, 8, 4)
    return Tile(256, 128, 8, 4)


def invariant_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm: RMSNormParams | None = None,
    residual: torch.Tensor | None = None,
    silu: bool = False,
    pdl: bool = False,
    *,
    few: bool | None = None,
    split: bool | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """`few`: by that kernel; `split`: whether slabs, of which there are several, are programs. Results are the same."""
    (rows, k), n = x.shape, weight.shape[0] // 2 if silu else weight.shape[0]
    y = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if rows == 0:
        return y
    slabs, full = Slabs.of(weight.shape[0], k), x.dtype is torch.float32
    launch = {"PDL": pdl, "enable_fp_fusion": False, **({"launch_pdl": True} if pdl else {})}
    flags = {
        "SLABS": slabs.count, "SLAB": slabs.size, "BLOCK_K": 32 if full else BLOCK_K, "SILU": silu,
        "HAS_BIAS": bias is not None, "HAS_RESIDUAL": residual is not None, **launch,
    }  # fmt: skip
    columns = max(16 // slabs.count, triton.next_power_of_2(rows))
    if few is None:
        few = not full and columns * slabs.count <= FEW_COLUMNS
    if few:
        outputs = HEIGHT // slabs.count // (2 if silu else 1)
        gain, eps = norm if norm is not None else (None, 0.0)
        _few_kernel[(triton.cdiv(n, outputs),)](
            x, weight, y, bias, residual, gain, rows, k, n, x.stride(0), eps,
            OUTPUTS=outputs, ROWS=columns, STAGES=FEW_STAGES, EVEN_K=slabs.even(k), LINES=_lines(slabs.size),
            HAS_NORM=norm is not None, num_warps=4, num_stages=FEW_STAGES, **flags,
        )  # fmt: skip
        return y
    x_scale = None
    if norm is not None:
        x, x_scale = _norm(x, norm, slabs, launch)
    tile = tile or tile_for(rows, slabs, x.dtype)
    grid = (triton.cdiv(rows, tile.rows), triton.cdiv(n, tile.outputs // 2 if silu else tile.outputs))
    tiles = grid[0] * grid[1]
    if split is None:
        split = tile.splits(tiles, slabs)
    space = SplitWorkspace.of(x.device)
    _many_kernel[(*grid, slabs.count if split else 1)](
        x, weight, y, bias, residual, x_scale, space.partial, space.arrived, rows, k, n, x.stride(0),
        SPLIT=split, BLOCK_M=tile.rows, BLOCK_N=tile.outputs, STAGES=tile.stages, EVEN_K=k % flags["BLOCK_K"] == 0,
        LINES=_lines(slabs.size if split else k), HAS_X_SCALE=x_scale is not None,
        num_warps=tile.warps, num_stages=tile.stages, **flags,
    )  # fmt: skip
    return y


def _lines(inputs: int) -> int:
    """Of a row, to be fetched ahead."""
    return min(8, triton.next_power_of_2(triton.cdiv(inputs, 64)))


def _norm(
    x: torch.Tensor, norm: RMSNormParams, slabs: Slabs, launch: dict[str, bool]
) -> tuple[torch.Tensor, torch.Tensor]:
    (rows, k), (gain, eps) = x.shape, norm
    out = torch.empty(rows, k, dtype=x.dtype, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    block_k = next(size for size in (256, 128, 64) if slabs.size % size == 0)
    stages = 2 if x.dtype is torch.float32 else 4
    _norm_kernel[(triton.cdiv(rows, NORM_ROWS),)](
        x, gain, out, scale, rows, k, x.stride(0), eps, SLABS=slabs.count, SLAB=slabs.size, BLOCK_M=NORM_ROWS,
        BLOCK_K=block_k, STAGES=stages, EVEN_K=slabs.even(k), num_warps=4, num_stages=stages, **launch,
    )  # fmt: skip
    return out, scale
