"""Copies of whole KV-cache blocks: a program for each tile of a layer's page."""

import torch
import triton
import triton.language as tl

TILE = 1024  # items


@triton.jit(do_not_specialize=["start", "num_layers"])
def _copy_kernel(table, blocks, start, buffer, page, num_layers, TO_PAGES: tl.constexpr, TILE: tl.constexpr):
    i, layer = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.program_id(2) * TILE + tl.arange(0, TILE)
    inside = at < page
    pages = tl.load(table + layer).to(tl.pointer_type(buffer.dtype.element_ty))
    in_pages = pages + tl.load(blocks + start + i) * page + at
    in_buffer = buffer + (i * num_layers + layer) * page + at
    if TO_PAGES:
        tl.store(in_pages, tl.load(in_buffer, mask=inside), mask=inside)
    else:
        tl.store(in_buffer, tl.load(in_pages, mask=inside), mask=inside)


def copy_blocks(table: torch.Tensor, blocks: torch.Tensor, start: int, buffer: torch.Tensor, to_pages: bool) -> None:
    """Shapes as in kernels/block_copies.py; `buffer` is contiguous."""
    if not len(buffer):
        return
    count, num_layers, page = buffer.shape
    grid = (count, num_layers, triton.cdiv(page, TILE))
    _copy_kernel[grid](table, blocks, start, buffer, page, num_layers, TO_PAGES=to_pages, TILE=TILE, num_warps=4)
