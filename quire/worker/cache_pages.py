"""The KV cache's memory: pages that groups of all kinds share, and each kind's views of them."""

import numpy as np
import torch

from quire.messages.kv_cache import KVCacheConfig, KVCacheSpec


def new_pages(config: KVCacheConfig, device: torch.device) -> torch.Tensor:
    """[blocks, page_bytes as items], zero: the null block and all others."""
    shape = (config.num_blocks + 1, config.page_bytes)
    if device.type != "cpu":
        pages = torch.zeros(shape, dtype=torch.uint8, device=device)
    else:
        # numpy maps zero pages, which cost nothing until used; torch would write gigabytes of zeros at start-up.
        pages = torch.from_numpy(np.zeros(shape, np.uint8))
    # Blocks are copied by items, so these should be large.
    return pages.view(torch.int64) if config.page_bytes % 8 == 0 else pages


def page_views(pages: torch.Tensor, spec: KVCacheSpec, count: int = 1) -> list[torch.Tensor]:
    """One tensor [blocks * count, *shape] for each part of the kind's pages, if a block is `count` pages to the
    kernels. Without gaps if the pages have one part and it fills them."""
    raw = pages.view(torch.uint8)
    raw = raw.view(raw.shape[0] * count, -1)
    num_tokens = spec.block_size // count
    offsets = spec.offsets(num_tokens)
    if offsets[-1] > raw.shape[1]:
        raise ValueError(f"a block of {spec.block_size} tokens cannot be {count} pages: parts are not aligned")
    views = []
    for begin, part in zip(offsets, spec.parts(num_tokens), strict=False):
        items = raw[:, begin : begin + part.nbytes].view(getattr(torch, part.dtype))
        views.append(items.unflatten(1, part.shape))
    return views


def block_view(pages: torch.Tensor, spec: KVCacheSpec) -> torch.Tensor:
    """[blocks, ...]: all that a block holds, for connectors; its bytes if that is more than one tensor."""
    views = page_views(pages, spec)
    return views[0] if len(views) == 1 else pages.view(torch.uint8)[:, : spec.page_bytes]
