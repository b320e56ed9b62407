"""Attention over pages, written plainly: what every backend's kernels are tested against."""

import torch


def paged_attention(
    q: torch.Tensor,  # [N, H, D]
    kv_cache: torch.Tensor,  # [blocks, 2, KV, block_size, D]
    rows: torch.Tensor,  # [n]: rows of block_table; -1: padding, whose output is zero
    query_start: torch.Tensor,  # [n + 1]
    seq_lens: torch.Tensor,  # [n]: keys of each row, those of its queries included
    block_table: torch.Tensor,  # [rows, max_blocks]
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    slopes: torch.Tensor | None = None,  # [H]: ALiBi
) -> torch.Tensor:  # [N, H, D]
    out = torch.zeros_like(q)
    num_heads = q.shape[1]
    _, _, kv_heads, block_size, head_size = kv_cache.shape
    for i, row in enumerate(rows.tolist()):
        length, first, last = int(seq_lens[i]), int(query_start[i]), int(query_start[i + 1])
        if row < 0 or length == 0:
            continue
        pages = kv_cache[block_table[row, : -(-length // block_size)].long()].to(q.dtype)
        k, v = (pages[:, part].transpose(0, 1).reshape(kv_heads, -1, head_size)[:, :length] for part in (0, 1))
        k, v = (x.repeat_interleave(num_heads // kv_heads, 0) for x in (k, v))
        scores = torch.einsum("qhd,hkd->hqk", q[first:last].float(), k.float()) * scale
        keys = torch.arange(length, device=q.device)
        queries = torch.arange(length - (last - first), length, device=q.device)[:, None]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if slopes is not None:
            scores = scores + slopes[:, None, None] * (keys - queries)
        hidden = keys > queries
        if window is not None:
            hidden = hidden | (keys <= queries - window)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[first:last] = torch.einsum("hqk,hkd->qhd", weights, v.float()).to(q.dtype)
    return out
