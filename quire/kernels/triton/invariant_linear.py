"""y = x W^T whose rows do not depend on one another: the order in which a row's products are added is the weight's.

One shape of tile serves any number of rows, so that the matrix instructions are the same. Inputs fall into slabs by the
weight's size alone; each is summed by itself, and slabs are added in order, by one program or by the last of several.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.triton.skinny_linear import COUNTERS, WORKSPACE_FLOATS, SplitWorkspace

PROGRAMS = 264  # two for each multiprocessor of an H200: below it, slabs are programs
MIN_STEPS = 4  # of a slab: shorter ones cost more to add than they save
HALF_TILE, FLOAT_TILE = (64, 128, 64), (32, 32, 32)  # rows, outputs, inputs


@triton.jit(do_not_specialize=["rows"])
def _invariant_linear_kernel(
    x,  # [rows, K]
    w,  # [N, K]
    y,  # [rows, N]
    bias,
    partial,  # [tiles, slabs, BLOCK_N, BLOCK_M] float32
    arrived,  # [tiles] int32: zero before and after
    rows,
    K,
    N,
    x_stride,
    SLABS: tl.constexpr,
    SLAB: tl.constexpr,  # inputs of one: a multiple of BLOCK_K
    SPLIT: tl.constexpr,  # a program for each slab; else one adds all
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    # Neighbours share a tile of the weight.
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows and columns past the end read the last one again: cheaper than a mask, and never stored.
    w_rows = w + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K
    x_rows = x + tl.minimum(m, rows - 1).to(tl.int64)[None, :] * x_stride
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    first_slab = tl.program_id(2) if SPLIT else 0
    last_slab = first_slab + 1 if SPLIT else SLABS
    for slab in range(first_slab, last_slab):
        begin = slab * SLAB
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for start in tl.range(begin, tl.minimum(begin + SLAB, K), BLOCK_K, num_stages=STAGES):
            k = start + tl.arange(0, BLOCK_K)
            if EVEN_K:
                right = tl.load(x_rows + k[:, None])
                left = tl.load(w_rows + k[None, :])
            else:
                right = tl.load(x_rows + k[:, None], mask=(k < K)[:, None], other=0.0)
                left = tl.load(w_rows + k[None, :], mask=(k < K)[None, :], other=0.0)
            acc = tl.dot(left, right, acc, input_precision="ieee")
        total += acc
    if SPLIT:
        SIZE: tl.constexpr = BLOCK_N * BLOCK_M
        place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        sums = partial + tile.to(tl.int64) * (SLABS * SIZE) + place
        tl.store(sums + first_slab * SIZE, total)
        # Every thread's part must be written before one thread counts it as arrived.
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") != SLABS - 1:
            return
        tl.store(arrived + tile, 0)
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for slab in tl.range(SLABS):
            total += tl.load(sums + slab * SIZE, cache_modifier=".cg")
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    inside = (m < rows)[None, :] & (n < N)[:, None]
    tl.store(y + m.to(tl.int64)[None, :] * N + n[:, None], total.to(y.dtype.element_ty), mask=inside)


def slabs_of(outputs: int, inputs: int, block_n: int, block_k: int) -> tuple[int, int]:
    """How many slabs the inputs of a weight fall into, and how many inputs each has."""
    steps = triton.cdiv(inputs, block_k)
    wanted = max(1, min(PROGRAMS // triton.cdiv(outputs, block_n), steps // MIN_STEPS))
    size = triton.cdiv(steps, wanted)
    return triton.cdiv(steps, size), size * block_k


def invariant_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, pdl: bool, split: bool | None = None
) -> torch.Tensor:
    """`split`: whether slabs are programs; the result is the same."""
    (rows, k), n = x.shape, weight.shape[0]
    y = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if rows == 0:
        return y
    full = x.dtype is torch.float32
    block_m, block_n, block_k = FLOAT_TILE if full else HALF_TILE
    slabs, slab = slabs_of(n, k, block_n, block_k)
    grid = (triton.cdiv(rows, block_m), triton.cdiv(n, block_n))
    tiles = grid[0] * grid[1]
    fits = tiles <= COUNTERS and tiles * slabs * block_n * block_m <= WORKSPACE_FLOATS
    if split is None:
        split = tiles < PROGRAMS
    split = split and fits and slabs > 1
    space, stages = SplitWorkspace.of(x.device), 2 if full else 4
    launch = {"PDL": pdl, **({"launch_pdl": True} if pdl else {})}
    _invariant_linear_kernel[(*grid, slabs if split else 1)](
        x, weight, y, bias, space.partial, space.arrived, rows, k, n, x.stride(0),
        SLABS=slabs, SLAB=slab, SPLIT=split, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=stages,
        EVEN_K=k % block_k == 0, HAS_BIAS=bias is not None, num_warps=4, num_stages=stages, **launch,
    )  # fmt: skip
    return y
