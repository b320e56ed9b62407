"""Copies of whole KV-cache blocks, all layers at once: pages of each layer's tensor to a buffer by block, and back."""

from collections.abc import Sequence

import torch

from quire.kernels.dispatch import use_triton


def page_table(pages: Sequence[torch.Tensor]) -> torch.Tensor:
    """[layers] int64: where each layer's pages begin, for the kernels."""
    return torch.tensor([one.data_ptr() for one in pages], dtype=torch.int64, device=pages[0].device)


def gather_blocks_torch(pages: Sequence[torch.Tensor], blocks: torch.Tensor, out: torch.Tensor) -> None:
    for layer, one in enumerate(pages):
        out[:, layer] = one.index_select(0, blocks)


def scatter_blocks_torch(pages: Sequence[torch.Tensor], blocks: torch.Tensor, source: torch.Tensor) -> None:
    for layer, one in enumerate(pages):
        one.index_copy_(0, blocks, source[:, layer])


def gather_blocks(
    pages: Sequence[torch.Tensor],  # by layer: [blocks, page]
    table: torch.Tensor,  # page_table(pages)
    blocks: torch.Tensor,  # [start + n or more] int64
    out: torch.Tensor,  # [n, layers, page]
    start: int = 0,  # of the blocks: a tensor that begins there need not be aligned
) -> None:
    if use_triton(out):
        from quire.kernels.triton import block_copies as kernel

        kernel.copy_blocks(table, blocks, start, out, to_pages=False)
    else:
        gather_blocks_torch(pages, blocks[start : start + len(out)], out)


def scatter_blocks(
    pages: Sequence[torch.Tensor],
    table: torch.Tensor,
    blocks: torch.Tensor,
    source: torch.Tensor,  # [n, layers, page]
    start: int = 0,
) -> None:
    """The other way."""
    if use_triton(source):
        from quire.kernels.triton import block_copies as kernel

        kernel.copy_blocks(table, blocks, start, source, to_pages=True)
    else:
        scatter_blocks_torch(pages, blocks[start : start + len(source)], source)
