"""y = x W^T for few rows: bound by reading W once, so everything here serves to keep loads in flight.

`gemv` keeps a slab of W in registers and multiplies on the CUDA cores, for 1 to 4 rows. `dot` loads W through shared
memory into the tensor cores, for up to 64 rows; W is the left operand there, because the left side of a Hopper matrix
instruction has 64 rows and the right one as few as 8.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.lora import RowTerms
from quire.kernels.rms_norm import RMSNormParams
from quire.kernels.skinny_table import MAX_DOT_ROWS, MAX_FUSED_ROWS, MAX_GEMV_ROWS, SkinnyConfig
from quire.kernels.triton.lora import ROW_FACTORS, ROW_RANKS, expand_row, row_splits, shrink_row, values_of
from quire.kernels.workspace import SharedWorkspace

WORKSPACE_FLOATS = 8 << 20  # partial sums of split products
COUNTERS = 8192
MIN_BLOCK_M = 16  # below it Triton falls back from Hopper's matrix instructions to the older ones
MAX_SHARED = 220 << 10


@triton.jit
def epilogue(
    acc,  # [.., ..] float32: the product
    acc_up,  # with SILU: the second half's product
    term,  # with HAS_TERM: added to the product
    term_up,
    n,  # output columns, broadcastable to acc
    m,  # rows, broadcastable to acc
    inside,  # mask of acc
    y,
    bias,
    residual,
    w_scale,
    x_scale,
    N,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_W_SCALE: tl.constexpr,
    HAS_X_SCALE: tl.constexpr,
    SILU: tl.constexpr,
    HAS_TERM: tl.constexpr,
):
    in_n, in_m = n < N, inside
    if HAS_X_SCALE:
        by_row = tl.load(x_scale + m, mask=in_m, other=0.0)
        acc *= by_row
        if SILU:
            acc_up *= by_row
    if HAS_W_SCALE:
        acc *= tl.load(w_scale + n, mask=in_n, other=0.0)
        if SILU:
            acc_up *= tl.load(w_scale + N + n, mask=in_n, other=0.0)
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)
        if SILU:
            acc_up += tl.load(bias + N + n, mask=in_n, other=0.0).to(tl.float32)
    if HAS_TERM:
        acc += term
        if SILU:
            acc_up += term_up
    if SILU:
        acc = acc / (1.0 + tl.exp(-acc)) * acc_up
    at = m.to(tl.int64) * N + n
    if HAS_RESIDUAL:
        acc += tl.load(residual + at, mask=in_m & in_n, other=0.0).to(tl.float32)
    tl.store(y + at, acc.to(y.dtype.element_ty), mask=in_m & in_n)


@triton.jit(do_not_specialize=["rows"])
def _gemv_kernel(
    x,  # [rows, K]
    w,  # [N, K], with SILU [2 * N, K]
    y,  # [rows, N]
    bias,
    residual,
    norm_weight,  # [K] of an RMSNorm of x
    w_scale,  # [N], or [N / GROUP_N, K / GROUP_K]
    x_scale,
    slots,  # of adapters
    lora_step,
    ranks,
    a,
    b,
    inner,
    terms,  # [rows, N], with SILU [rows, 2 * N]
    rows,
    K,
    N,
    x_stride,
    eps,
    shrinks,  # programs of `shrink_row`
    expands,  # of `expand_row`
    splits,
    width,
    rank,
    second,
    third,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    ONE_STEP: tl.constexpr,  # BLOCK_K covers K: no loop, and the accumulators need no registers
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_W_SCALE: tl.constexpr,
    HAS_X_SCALE: tl.constexpr,
    GROUP_N: tl.constexpr,  # outputs and inputs that share a scale of the weight; 0: a scale per output
    GROUP_K: tl.constexpr,
    SILU: tl.constexpr,
    SPLITS: tl.constexpr,  # at least as many as the inner products of adapters have; 0: there are no adapters
    SPLIT_INPUTS: tl.constexpr,
    SPLIT_RANKS: tl.constexpr,
    SPLITS_EVEN: tl.constexpr,
    RANKS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    block = tl.program_id(0)
    if SPLITS > 0:
        if block < shrinks:
            shrink_row(
                block, x, norm_weight, slots, lora_step, ranks, a, inner, x_stride, splits, width, K,
                SPLIT_INPUTS, SPLIT_RANKS, SPLITS_EVEN, HAS_NORM, PDL,
            )  # fmt: skip
            return
        if block < shrinks + expands:
            expand_row(
                block - shrinks, slots, lora_step, ranks, b, inner, terms, 2 * N if SILU else N, splits, width, rank,
                second, third, OUTPUTS, SPLITS, RANKS, PDL,
            )  # fmt: skip
            return
        block -= shrinks + expands
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    if SPLITS > 0:
        step, words = 0, tl.zeros([BLOCK_N], tl.int64)
        up_words = words
    # Columns past the end read the last one again: cheaper than a mask, and never stored.
    w_rows = w + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K
    # One accumulator per row, reduced once at the end: a reduction in the loop would be a barrier in the loop.
    acc0 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    up0, up1, up2, up3 = acc0, acc0, acc0, acc0
    squares0 = tl.zeros([BLOCK_K], tl.float32)
    squares1, squares2, squares3 = squares0, squares0, squares0
    if PDL and STAGES > 1 and not ONE_STEP:
        # A pipelined loop issues its first loads before everything in it, a wait included.
        gdc_wait()
    for start in tl.range(0, BLOCK_K if ONE_STEP else K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        if EVEN_K:
            tile = _wide(tl.load(w_rows + k[None, :], eviction_policy="evict_first"))
        else:
            tile = _wide(tl.load(w_rows + k[None, :], mask=(k < K)[None, :], other=0.0))
        tile_up = tile
        if SILU:
            up_rows = w_rows + N.to(tl.int64) * K
            if EVEN_K:
                tile_up = _wide(tl.load(up_rows + k[None, :], eviction_policy="evict_first"))
            else:
                tile_up = _wide(tl.load(up_rows + k[None, :], mask=(k < K)[None, :], other=0.0))
        factor, factor_up = squares0, squares0
        if GROUP_N > 0:
            # The tile's outputs share their scales, so x is multiplied by these instead of the weights.
            first = block * BLOCK_N
            factor = scales_of(w_scale, first // GROUP_N, start, K, BLOCK_K, GROUP_K)
            if SILU:
                factor_up = scales_of(w_scale, (N + first) // GROUP_N, start, K, BLOCK_K, GROUP_K)
        if PDL:
            # The weights are being loaded before the kernel that writes x has ended.
            gdc_wait()
        if SPLITS > 0 and ONE_STEP:
            step, words, up_words = _words_now(n, 0, terms, lora_step, N, SILU)
        gain = tl.load(norm_weight + k, mask=k < K, other=0.0).to(tl.float32) if HAS_NORM else squares0
        acc0, up0, squares0 = _row(
            x, gain, factor, factor_up, tile, tile_up, acc0, up0, squares0, 0, rows, k, K, x_stride,
            EVEN_K, HAS_NORM, GROUP_N > 0, SILU,
        )  # fmt: skip
        if ROWS > 1:
            acc1, up1, squares1 = _row(
                x, gain, factor, factor_up, tile, tile_up, acc1, up1, squares1, 1, rows, k, K, x_stride,
                EVEN_K, HAS_NORM, GROUP_N > 0, SILU,
            )  # fmt: skip
        if ROWS > 2:
            acc2, up2, squares2 = _row(
                x, gain, factor, factor_up, tile, tile_up, acc2, up2, squares2, 2, rows, k, K, x_stride,
                EVEN_K, HAS_NORM, GROUP_N > 0, SILU,
            )  # fmt: skip
            acc3, up3, squares3 = _row(
                x, gain, factor, factor_up, tile, tile_up, acc3, up3, squares3, 3, rows, k, K, x_stride,
                EVEN_K, HAS_NORM, GROUP_N > 0, SILU,
            )  # fmt: skip
    factor0, total0, total_up0 = _reduced(acc0, up0, squares0, K, eps, HAS_NORM, SILU)
    factor1, total1, total_up1 = factor0, total0, total_up0
    if ROWS > 1:
        factor1, total1, total_up1 = _reduced(acc1, up1, squares1, K, eps, HAS_NORM, SILU)
    term, up = 0.0, 0.0
    if SPLITS > 0:
        if not ONE_STEP:
            step, words, up_words = _words_now(n, 0, terms, lora_step, N, SILU)
        term, up = _terms(n, 0, terms, step, words, up_words, N, SILU)
    _write_row(
        factor0, total0, total_up0, term, up, n, 0, rows, y, bias, residual, w_scale, x_scale, N,
        HAS_BIAS, HAS_RESIDUAL, HAS_W_SCALE, HAS_X_SCALE, SILU, SPLITS > 0,
    )  # fmt: skip
    if ROWS > 1:
        if SPLITS > 0:
            row = tl.minimum(1, rows - 1)
            step, words, up_words = _words_now(n, row, terms, lora_step, N, SILU)
            term, up = _terms(n, row, terms, step, words, up_words, N, SILU)
        _write_row(
            factor1, total1, total_up1, term, up, n, 1, rows, y, bias, residual, w_scale, x_scale, N,
            HAS_BIAS, HAS_RESIDUAL, HAS_W_SCALE, HAS_X_SCALE, SILU, SPLITS > 0,
        )  # fmt: skip
    if ROWS > 2:
        factor2, total2, total_up2 = _reduced(acc2, up2, squares2, K, eps, HAS_NORM, SILU)
        _write_row(
            factor2, total2, total_up2, term, up, n, 2, rows, y, bias, residual, w_scale, x_scale, N,
            HAS_BIAS, HAS_RESIDUAL, HAS_W_SCALE, HAS_X_SCALE, SILU, False,
        )  # fmt: skip
        factor3, total3, total_up3 = _reduced(acc3, up3, squares3, K, eps, HAS_NORM, SILU)
        _write_row(
            factor3, total3, total_up3, term, up, n, 3, rows, y, bias, residual, w_scale, x_scale, N,
            HAS_BIAS, HAS_RESIDUAL, HAS_W_SCALE, HAS_X_SCALE, SILU, False,
        )  # fmt: skip


@triton.jit
def _wide(tile):
    """In float32. Conversions from int8 are slow: instead its bits become the lowest of 2 ** 23."""
    if tile.dtype == tl.int8:
        bits = ((tile.to(tl.int32) & 0xFF) ^ 0x80) | 0x4B000000
        return bits.to(tl.float32, bitcast=True) - 8388736.0
    else:
        return tile.to(tl.float32)


@triton.jit
def scales_of(w_scale, row, start, K, BLOCK_K: tl.constexpr, GROUP_K: tl.constexpr):
    """[BLOCK_K]: a row of scales from input `start` on, repeated for the inputs of a group."""
    GROUPS: tl.constexpr = BLOCK_K // GROUP_K
    group = start // GROUP_K + tl.arange(0, GROUPS)
    scales = tl.load(w_scale + row * (K // GROUP_K) + group, mask=group < K // GROUP_K, other=0.0)
    return tl.reshape(tl.broadcast_to(scales[:, None], [GROUPS, GROUP_K]), [BLOCK_K])


@triton.jit
def _row(
    x, gain, factor, factor_up, tile, tile_up, acc, acc_up, squares, m, rows, k, K, x_stride,
    EVEN_K: tl.constexpr, HAS_NORM: tl.constexpr, HAS_GROUPS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Add one row's products with a tile of W."""
    at = x + tl.minimum(m, rows - 1).to(tl.int64) * x_stride + k
    values = tl.load(at).to(tl.float32) if EVEN_K else tl.load(at, mask=k < K, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares += values * values
        values *= gain
    if HAS_GROUPS:
        acc += tile * (values * factor)[None, :]
        if SILU:
            acc_up += tile_up * (values * factor_up)[None, :]
    else:
        acc += tile * values[None, :]
        if SILU:
            acc_up += tile_up * values[None, :]
    return acc, acc_up, squares


@triton.jit
def _reduced(acc, acc_up, squares, K, eps, HAS_NORM: tl.constexpr, SILU: tl.constexpr):
    """A row's sums, and the norm's factor, which is one number per row and so is applied to the sum."""
    total = tl.sum(acc, 1)
    total_up = tl.sum(acc_up, 1) if SILU else total
    factor = tl.rsqrt(tl.sum(squares, 0) / K + eps) if HAS_NORM else 1.0
    return factor, total, total_up


@triton.jit
def _write_row(
    factor, total, total_up, term, term_up, n, m, rows, y, bias, residual, w_scale, x_scale, N,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_W_SCALE: tl.constexpr, HAS_X_SCALE: tl.constexpr,
    SILU: tl.constexpr, HAS_TERM: tl.constexpr,
):  # fmt: skip
    m_of = tl.zeros_like(n) + m
    epilogue(
        total * factor, total_up * factor, term * factor, term_up * factor, n, m_of, m_of < rows, y, bias, residual,
        w_scale, x_scale, N, HAS_BIAS, HAS_RESIDUAL, HAS_W_SCALE, HAS_X_SCALE, SILU, HAS_TERM,
    )  # fmt: skip


@triton.jit
def _words_now(n, row, terms, lora_step, N, SILU: tl.constexpr):
    """The step, and what there is of a row's terms: loaded long before they are needed, and most often complete."""
    at = terms + row * (2 * N if SILU else N) + tl.minimum(n, N - 1)
    words = tl.load(at, volatile=True)
    up_words = tl.load(at + N, volatile=True) if SILU else words
    return tl.load(lora_step), words, up_words


@triton.jit
def _terms(n, row, terms, step, words, up_words, N, SILU: tl.constexpr):
    """Of a row's adapter, for columns `n`; with SILU also for those of the second half."""
    at = terms + row * (2 * N if SILU else N) + tl.minimum(n, N - 1)
    term = values_of(words, at, step)
    return term, values_of(up_words, at + N, step) if SILU else term


@triton.jit
def prefetch(rows, first, K, LINES: tl.constexpr, LINE: tl.constexpr):
    """Prefetch the first LINES cache lines of each row of a tile."""
    lines = rows + tl.minimum(first + tl.arange(0, LINES) * LINE, K - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _dot(left, right, acc):
    if acc.dtype == tl.int32:
        return tl.dot(left, right, acc, out_dtype=tl.int32)
    else:
        return tl.dot(left, right, acc)


@triton.jit(do_not_specialize=["rows", "splits", "x_scale_stride"])
def _dot_kernel(
    x,  # [rows, K]
    w,  # [N, K], with SILU [2 * N, K]
    y,  # [rows, N]
    bias,
    residual,
    w_scale,
    x_scale,
    partial,  # [tiles, splits, halves, BLOCK_N, BLOCK_M] float32
    arrived,  # [tiles] int32: zero before and after
    rows,
    splits,
    K,
    N,
    x_stride,
    x_scale_stride,  # of x's scales from one group of inputs to the next
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,  # whether splits > 1
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    LINES: tl.constexpr,
    LINE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_W_SCALE: tl.constexpr,
    HAS_X_SCALE: tl.constexpr,
    GROUP_N: tl.constexpr,  # outputs and inputs that share a scale of the weight; 0: a scale per output
    GROUP_K: tl.constexpr,
    SILU: tl.constexpr,
    PDL: tl.constexpr,
):
    tile, split = tl.program_id(0), tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), splits)
    begin = split * steps * BLOCK_K
    end = tl.minimum(begin + steps * BLOCK_K, K)
    # Rows and columns past the end read the last one again: cheaper than a mask, and never stored.
    w_rows = w + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K
    x_rows = x + tl.minimum(m, rows - 1).to(tl.int64)[None, :] * x_stride
    up_rows = w_rows + N.to(tl.int64) * K if SILU else w_rows
    if PDL:
        gdc_launch_dependents()
        prefetch(w_rows, begin, K, LINES, LINE)
        if SILU:
            prefetch(up_rows, begin, K, LINES, LINE)
        gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.int32 if w.dtype.element_ty == tl.int8 else tl.float32)
    acc_up = acc
    for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        if EVEN_K:
            right = tl.load(x_rows + k[:, None])
            left = tl.load(w_rows + k[None, :], eviction_policy="evict_first")
        else:
            right = tl.load(x_rows + k[:, None], mask=(k < K)[:, None], other=0.0)
            left = tl.load(w_rows + k[None, :], mask=(k < K)[None, :], other=0.0)
        if GROUP_N > 0:
            # Both operands' scales change with the group of inputs, of which a step is a part.
            group = start // GROUP_K
            row = tile * BLOCK_N // GROUP_N
            scale = tl.load(w_scale + row * (K // GROUP_K) + group)
            by_row = tl.zeros([BLOCK_M], tl.float32) + 1.0
            if HAS_X_SCALE:
                by_row = tl.load(x_scale + group * x_scale_stride + m, mask=m < rows, other=0.0)
            acc += tl.dot(left.to(right.dtype), right) * (by_row * scale)[None, :]
        else:
            acc = _dot(left.to(right.dtype), right, acc)
        if SILU:
            if EVEN_K:
                left = tl.load(up_rows + k[None, :], eviction_policy="evict_first")
            else:
                left = tl.load(up_rows + k[None, :], mask=(k < K)[None, :], other=0.0)
            if GROUP_N > 0:
                scale = tl.load(w_scale + (row + N // GROUP_N) * (K // GROUP_K) + group)
                acc_up += tl.dot(left.to(right.dtype), right) * (by_row * scale)[None, :]
            else:
                acc_up = _dot(left.to(right.dtype), right, acc_up)
    acc, acc_up = acc.to(tl.float32), acc_up.to(tl.float32)

    if SPLIT:
        HALVES: tl.constexpr = 2 if SILU else 1
        SIZE: tl.constexpr = BLOCK_N * BLOCK_M
        place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        sums = partial + tile * splits * (HALVES * SIZE) + place
        tl.store(sums + split * (HALVES * SIZE), acc)
        if SILU:
            tl.store(sums + split * (HALVES * SIZE) + SIZE, acc_up)
        # Every thread's part must be written before one thread counts it as arrived.
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") != splits - 1:
            return
        tl.store(arrived + tile, 0)
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        acc_up = acc
        for other in tl.range(splits):  # in order, whichever program came last: the same bits every time
            acc += tl.load(sums + other * (HALVES * SIZE), cache_modifier=".cg")
            if SILU:
                acc_up += tl.load(sums + other * (HALVES * SIZE) + SIZE, cache_modifier=".cg")

    epilogue(
        acc, acc_up, acc, acc_up, n[:, None], m[None, :], (m < rows)[None, :], y, bias, residual, w_scale, x_scale, N,
        HAS_BIAS, HAS_RESIDUAL, HAS_W_SCALE, HAS_X_SCALE and GROUP_N == 0, SILU, False,
    )  # fmt: skip


class SplitWorkspace(SharedWorkspace):
    """Partial sums and arrival counters of split products."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.partial = torch.empty(WORKSPACE_FLOATS, dtype=torch.float32, device=device)
        self.arrived = self.new_counters(COUNTERS)


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    config: SkinnyConfig,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm: RMSNormParams | None,
    silu: bool,
    out_dtype: torch.dtype,
    pdl: bool,
    groups: tuple[int, int] | None,
    terms: RowTerms | None,
) -> torch.Tensor:
    rows, k = x.shape
    n = weight.shape[0] // 2 if silu else weight.shape[0]
    y = torch.empty(rows, n, dtype=out_dtype, device=x.device)
    flags = {
        "EVEN_K": k % config.block_k == 0,
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "HAS_W_SCALE": weight_scale is not None and groups is None,
        "HAS_X_SCALE": x_scale is not None,
        "GROUP_N": groups[0] if groups is not None else 0,
        "GROUP_K": groups[1] if groups is not None else 0,
        "SILU": silu,
        "PDL": pdl,
        "num_warps": config.warps,
    }
    if pdl:
        flags["launch_pdl"] = True
    tiles = triton.cdiv(n, config.block_n)
    if config.kind == "gemv":
        assert rows <= MAX_GEMV_ROWS and (groups is None or x_scale is None)
        gain, eps = norm if norm is not None else (None, 0.0)
        if terms is not None:  # or programs would wait for what nobody writes
            w = terms.w
            assert w.terms is not None and rows <= MAX_FUSED_ROWS and x_scale is None
            assert w.b.shape[1] == weight.shape[0] and w.a.shape[2] == k
        factors, sizes, of_terms = _given(terms, rows, k, config.warps)
        _gemv_kernel[(sizes[0] + sizes[1] + tiles,)](
            x, weight, y, bias, residual, gain, weight_scale, x_scale, *factors, rows, k, n, x.stride(0), eps, *sizes,
            ROWS=triton.next_power_of_2(rows), BLOCK_N=config.block_n, BLOCK_K=config.block_k,
            STAGES=config.stages, ONE_STEP=k <= config.block_k, HAS_NORM=norm is not None,
            num_stages=config.stages, **of_terms, **flags,
        )  # fmt: skip
        return y
    assert rows <= MAX_DOT_ROWS and norm is None and terms is None
    block_m = max(MIN_BLOCK_M, triton.next_power_of_2(rows))
    halves = 2 if silu else 1
    size = weight.element_size()
    step = (halves * config.block_n * size + block_m * x.element_size()) * config.block_k
    stages = min(config.stages, MAX_SHARED // step)
    space = SplitWorkspace.of(x.device)
    if config.splits > 1:
        needed = tiles * config.splits * halves * config.block_n * block_m
        if needed > WORKSPACE_FLOATS or tiles > COUNTERS:
            raise ValueError(f"{config} needs {needed} floats for {rows} rows of {n}; there are {WORKSPACE_FLOATS}")
    per_line = 128 // size
    slab = triton.cdiv(triton.cdiv(k, config.block_k), config.splits) * config.block_k
    _dot_kernel[(tiles, config.splits)](
        x, weight, y, bias, residual, weight_scale, x_scale, space.partial, space.arrived,
        rows, config.splits, k, n, x.stride(0), x_scale.stride(-1) if x_scale is not None and groups is not None else 0,
        BLOCK_M=block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SPLIT=config.splits > 1, STAGES=stages,
        LINES=min(8, triton.next_power_of_2(triton.cdiv(slab, per_line))) if pdl else 1, LINE=per_line,
        num_stages=stages, **flags,
    )  # fmt: skip
    return y


def _given(
    terms: RowTerms | None, rows: int, num_inputs: int, warps: int
) -> tuple[tuple[torch.Tensor | None, ...], tuple[int, ...], dict[str, int]]:
    """Arguments of the gemv kernel."""
    if terms is None:
        names = ("SPLITS", "SPLIT_INPUTS", "SPLIT_RANKS", "SPLITS_EVEN", "RANKS", "OUTPUTS")
        return (None,) * 7, (0,) * 7, dict.fromkeys(names, 0)
    w = terms.w
    splits, inputs = row_splits(num_inputs)
    factors = ROW_FACTORS * warps
    width, outputs, of_split, of_expand = w.a.shape[1], w.b.shape[1], max(1, factors // inputs), factors // ROW_RANKS
    flags = {
        "SPLITS": triton.next_power_of_2(splits),
        "SPLIT_INPUTS": inputs,
        "SPLIT_RANKS": of_split,
        "SPLITS_EVEN": num_inputs % inputs == 0,
        "RANKS": ROW_RANKS,
        "OUTPUTS": of_expand,
    }
    programs = rows * splits * triton.cdiv(width, of_split), rows * triton.cdiv(outputs, of_expand)
    given = (terms.slots, terms.step, w.ranks, w.a, w.b, w.inner, w.terms)
    return given, (*programs, splits, width, w.rank, *w.boundaries), flags
