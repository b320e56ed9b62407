"""A step's input ids, positions, cache slots and lengths from the state of its rows."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.dispatch import early_launch

BLOCK = 128
ONE_PAGE = 1 << 30  # tokens: more than any sequence has


@triton.jit(do_not_specialize=["n"])
def _rows_kernel(
    rows,
    query_start,
    num_computed,
    first_position,
    seq_lens,
    n,
    DECODE_ONLY: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Position of each row's first token, and its length after the step."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(rows + i, mask=i < n, other=-1).to(tl.int64)
    real = row >= 0
    computed = tl.load(num_computed + row, mask=real, other=0)
    if DECODE_ONLY:
        num_new = tl.where(real, 1, 0)
    else:
        num_new = tl.load(query_start + i + 1, mask=real, other=0) - tl.load(query_start + i, mask=real, other=0)
    tl.store(first_position + i, computed.to(tl.int32), mask=i < n)
    tl.store(seq_lens + i, tl.where(real, computed + num_new, 0).to(tl.int32), mask=i < n)
    tl.store(num_computed + row, computed + num_new, mask=real)


@triton.jit(do_not_specialize=["num_tokens", "tokens_stride", "table_stride"])
def _tokens_kernel(
    rows,
    query_start,
    token_rows,
    first_position,
    token_ids,
    tokens_stride,
    block_table,
    table_stride,
    input_ids,
    positions,
    slots,
    num_tokens,
    BLOCK_SIZE: tl.constexpr,
    DECODE_ONLY: tl.constexpr,
    SLOTS_ONLY: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if DECODE_ONLY:
        i = token
        offset = tl.zeros([BLOCK], tl.int32)
    else:
        i = tl.load(token_rows + token, mask=inside, other=-1)
        offset = token - tl.load(query_start + i, mask=inside & (i >= 0), other=0)
    row = tl.load(rows + i, mask=inside & (i >= 0), other=-1).to(tl.int64)
    real = row >= 0
    position = tl.where(real, tl.load(first_position + i, mask=real, other=0) + offset, 0)
    page = tl.load(block_table + row * table_stride + position // BLOCK_SIZE, mask=real, other=0)
    tl.store(slots + token, page.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE, mask=inside)
    if not SLOTS_ONLY:
        tl.store(positions + token, position, mask=inside)
        ids = tl.load(token_ids + row * tokens_stride + position, mask=real, other=0)
        tl.store(input_ids + token, ids, mask=inside)


def prepare_inputs(
    rows: torch.Tensor,
    query_start: torch.Tensor,
    token_rows: torch.Tensor | None,
    token_ids: torch.Tensor,
    num_computed: torch.Tensor,
    block_tables: list[torch.Tensor],
    block_sizes: list[int],
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], torch.Tensor]:
    n, decode_only = len(rows), token_rows is None
    num_tokens = n if token_rows is None else len(token_rows)
    # Not halves of one tensor: the second would be unaligned for some sizes, for which Triton compiles other kernels.
    first_position, seq_lens = (torch.empty(n, dtype=torch.int32, device=rows.device) for _ in range(2))
    input_ids, positions = (torch.empty(num_tokens, dtype=torch.int32, device=rows.device) for _ in range(2))
    _rows_kernel[(triton.cdiv(n, BLOCK),)](
        rows,
        query_start,
        num_computed,
        first_position,
        seq_lens,
        n,
        DECODE_ONLY=decode_only,
        BLOCK=BLOCK,
        num_warps=4,
        **early_launch(rows),
    )  # fmt: skip
    slots: list[torch.Tensor] = []
    groups = [(table, table.stride(0), size) for table, size in zip(block_tables, block_sizes, strict=True)]
    # Ids and positions are wanted also where nothing is cached: any tensor is a table of one page, its slots dropped.
    for group, (table, stride, size) in enumerate(groups or [(rows, 0, ONE_PAGE)]):
        slots.append(torch.empty(num_tokens, dtype=torch.int64, device=rows.device))
        _tokens_kernel[(triton.cdiv(num_tokens, BLOCK),)](
            rows, query_start, token_rows if token_rows is not None else rows, first_position,
            token_ids, token_ids.stride(0), table, stride, input_ids, positions, slots[-1], num_tokens,
            BLOCK_SIZE=size, DECODE_ONLY=decode_only, SLOTS_ONLY=group > 0, BLOCK=BLOCK, num_warps=4,
            **early_launch(rows),
        )  # fmt: skip
    return input_ids, positions, slots[: len(groups)], seq_lens
