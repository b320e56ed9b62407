"""Many rows times a weight, both fp8 or int8, with scales applied to sums in registers.

With scales per block a product over one group of inputs is summed by the matrix instructions, then scaled and added to
the total in float32: this is as exact as the scales are, and leaves the short sums to the tensor cores.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.scaled_table import ScaledConfig

NEIGHBOURS = 8  # tiles of rows that are multiplied by the same columns one after the other: both hit the cache
DEQUANTIZED = 4096  # weights of a program
SCALED = 1024  # columns of a program


@triton.jit(do_not_specialize=["M", "x_scale_stride"])
def _kernel(
    x,  # [M, K]; with TMA a descriptor of it
    w,  # [N, K]; with TMA a descriptor of it
    y,  # [M, N]
    bias,  # [N]
    x_scale,  # [M]; with groups [K / GROUP_K, M]
    w_scale,  # [N]; with groups [N / GROUP_N, K / GROUP_K]
    M,
    N,
    K,
    x_scale_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUP_N: tl.constexpr,  # 0: a scale per row and output
    GROUP_K: tl.constexpr,
    INTEGERS: tl.constexpr,
    TMA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    each = NEIGHBOURS * tiles_n
    first = tl.program_id(0) // each * NEIGHBOURS
    height = tl.minimum(tiles_m - first, NEIGHBOURS)
    tile_m = first + tl.program_id(0) % each % height
    tile_n = tl.program_id(0) % each // height
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if not TMA:
        # Rows and columns past the end read the last one again: cheaper than a mask, and never stored.
        x_rows = x + tl.minimum(m, M - 1).to(tl.int64)[:, None] * K
        w_rows = w + tl.minimum(n, N - 1).to(tl.int64)[None, :] * K
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if INTEGERS else tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        if TMA:
            left = x.load([tile_m * BLOCK_M, start])
            right = w.load([tile_n * BLOCK_N, start]).T
        elif EVEN_K:
            left = tl.load(x_rows + k[None, :])
            right = tl.load(w_rows + k[:, None])
        else:
            left = tl.load(x_rows + k[None, :], mask=(k < K)[None, :], other=0.0)
            right = tl.load(w_rows + k[:, None], mask=(k < K)[:, None], other=0.0)
        if GROUP_K > 0:
            group = start // GROUP_K
            by_row = tl.load(x_scale + group * x_scale_stride + m, mask=m < M, other=0.0)
            if GROUP_N % BLOCK_N == 0:
                scale = tl.load(w_scale + (tile_n * BLOCK_N // GROUP_N) * (K // GROUP_K) + group)
                acc += tl.dot(left, right) * (by_row * scale)[:, None]
            else:
                by_column = tl.load(w_scale + (n // GROUP_N) * (K // GROUP_K) + group, mask=n < N, other=0.0)
                acc += tl.dot(left, right) * by_row[:, None] * by_column[None, :]
        elif INTEGERS:
            acc = tl.dot(left, right, acc, out_dtype=tl.int32)
        else:
            acc = tl.dot(left, right, acc)
    total = acc.to(tl.float32)
    if GROUP_K == 0:
        by_row = tl.load(x_scale + m, mask=m < M, other=0.0)
        by_column = tl.load(w_scale + n, mask=n < N, other=0.0)
        total = total * by_row[:, None] * by_column[None, :]
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at = y + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, total.to(y.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def scaled_linear(
    q: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    groups: tuple[int, int] | None,
    config: ScaledConfig,
) -> torch.Tensor:
    (rows, k), n = q.shape, len(weight)
    group_n, group_k = groups or (0, 0)
    block_k = min(config.block_k, group_k) if group_k else config.block_k
    has_tma, shared = _limits(q.device)
    tma = config.tma and has_tma and k % 16 == 0
    stages = max(1, min(config.stages, shared // ((config.block_m + config.block_n) * block_k)))
    y = torch.empty(rows, n, dtype=out_dtype, device=q.device)
    operands = (q, weight)
    if tma:
        shapes = ([config.block_m, block_k], [config.block_n, block_k])
        operands = tuple(TensorDescriptor.from_tensor(t, s) for t, s in zip(operands, shapes, strict=True))
    tiles = triton.cdiv(rows, config.block_m) * triton.cdiv(n, config.block_n)
    _kernel[(tiles,)](
        *operands, y, bias, x_scale, weight_scale, rows, n, k, x_scale.stride(-1) if groups else 0,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=block_k, STAGES=stages, NEIGHBOURS=NEIGHBOURS,
        EVEN_K=k % block_k == 0, GROUP_N=group_n, GROUP_K=group_k, INTEGERS=q.dtype is torch.int8, TMA=tma,
        HAS_BIAS=bias is not None, num_warps=config.warps, num_stages=stages,
    )  # fmt: skip
    return y


@triton.jit
def _scale_kernel(
    products,  # [M, N] int32
    x_scale,
    w_scale,
    bias,
    y,
    N,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    scale = tl.load(x_scale + row) * tl.load(w_scale + n, mask=inside, other=0.0)
    total = tl.load(products + row * N + n, mask=inside, other=0).to(tl.float32) * scale
    if HAS_BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * N + n, total.to(y.dtype.element_ty), mask=inside)


def scale_products(
    products: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Sums of integers [M, N] times the scales of rows [M] and outputs [N]."""
    rows, n = products.shape
    y = torch.empty(rows, n, dtype=out_dtype, device=products.device)
    _scale_kernel[(rows, triton.cdiv(n, SCALED))](
        products, x_scale, weight_scale, bias, y, n, BLOCK=SCALED, HAS_BIAS=bias is not None, num_warps=4
    )
    return y


@triton.jit
def _dequantize_kernel(
    w,  # [N, K] fp8
    scale,
    out,  # [N, K]
    K,
    BLOCK: tl.constexpr,
    GROUP_N: tl.constexpr,  # 0: a scale per output
    GROUP_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(w + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    if GROUP_N > 0:
        groups = tl.program_id(1) * (BLOCK // GROUP_K) + tl.arange(0, BLOCK // GROUP_K)
        by_group = tl.load(scale + row // GROUP_N * (K // GROUP_K) + groups, mask=groups < K // GROUP_K, other=0.0)
        values *= tl.reshape(tl.broadcast_to(by_group[:, None], [BLOCK // GROUP_K, GROUP_K]), [BLOCK])
    else:
        values *= tl.load(scale + row)
    tl.store(out + row * K + k, values.to(out.dtype.element_ty), mask=k < K)


def dequantize_fp8(
    weight: torch.Tensor, scale: torch.Tensor, groups: tuple[int, int] | None, dtype: torch.dtype
) -> torch.Tensor:
    """Weights of experts have a dimension before these; outputs of one are whole groups."""
    k = weight.shape[-1]
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    group_n, group_k = groups or (0, 0)
    block = max(group_k, min(DEQUANTIZED, triton.next_power_of_2(k)))
    _dequantize_kernel[(weight.numel() // k, triton.cdiv(k, block))](
        weight, scale, out, k, BLOCK=block, GROUP_N=group_n, GROUP_K=group_k, num_warps=4
    )
    return out


@functools.cache
def _limits(device: torch.device) -> tuple[bool, int]:
    """Whether there is a tensor memory accelerator, and the bytes of shared memory for a program's tiles."""
    if device.type != "cuda":
        return True, 220 << 10
    major, _ = torch.cuda.get_device_capability(device)
    return major >= 9, (220 if major in (9, 10) else 92) << 10
