"""Paged attention in torch: the reference that every backend's kernels are tested against, and its parameters."""

from dataclasses import dataclass

import torch

from quire.kernels.kv_scales import KVScales, dequantized


@dataclass(frozen=True)
class AttentionShape:
    """Heads of a layer."""

    num_heads: int
    num_kv_heads: int
    head_size: int

    @property
    def group(self) -> int:
        """Query heads to a KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, eq=False)
class AttentionFeatures:
    """Of a layer: weights are softmax(cap(q k scale) + slope (key position - query position)) over visible keys."""

    scale: float
    window: int | None = None  # keys that a query sees, itself among them
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    slopes: torch.Tensor | None = None  # [H] float32: ALiBi's
    sinks: torch.Tensor | None = None  # [H] float32: the score of an additional key, whose value is zero
    causal: bool = True  # False: a query sees all keys of its row, later ones of the step too
    kv_scales: KVScales | None = None  # of keys and values in the cache


def paged_attention(
    q: torch.Tensor,  # [N, H, D]
    kv_cache: torch.Tensor,  # [blocks, 2, KV, block_size, D]
    rows: torch.Tensor,  # [n]: rows of block_table; -1: padding, whose output is zero
    query_start: torch.Tensor,  # [n + 1]
    seq_lens: torch.Tensor,  # [n]: keys of each row, those of its queries included
    block_table: torch.Tensor,  # [rows, max_blocks]
    features: AttentionFeatures,
) -> torch.Tensor:  # [N, H, D]
    out = torch.zeros_like(q)
    num_heads = q.shape[1]
    _, _, kv_heads, block_size, head_size = kv_cache.shape
    for i, row in enumerate(rows.tolist()):
        length, first, last = int(seq_lens[i]), int(query_start[i]), int(query_start[i + 1])
        if row < 0 or length == 0:
            continue
        blocks = block_table[row, : -(-length // block_size)].long()
        pages = dequantized(kv_cache, blocks, features.kv_scales, q.dtype)
        k, v = (pages[:, part].transpose(0, 1).reshape(kv_heads, -1, head_size)[:, :length] for part in (0, 1))
        k, v = (x.repeat_interleave(num_heads // kv_heads, 0) for x in (k, v))
        scores = torch.einsum("qhd,hkd->hqk", q[first:last].float(), k.float()) * features.scale
        keys = torch.arange(length, device=q.device)
        queries = torch.arange(length - (last - first), length, device=q.device)[:, None]
        if features.softcap is not None:
            scores = features.softcap * torch.tanh(scores / features.softcap)
        if features.slopes is not None:
            scores = scores + features.slopes[:, None, None] * (keys - queries)
        masked = (keys > queries) & features.causal
        if features.window is not None:
            masked = masked | (keys <= queries - features.window)
        scores = scores.masked_fill(masked, -torch.inf)
        if features.sinks is not None:
            scores = torch.cat((scores, features.sinks[:, None, None].expand(-1, last - first, 1)), dim=-1)
        weights = scores.softmax(-1)[..., :length]
        out[first:last] = torch.einsum("hqk,hkd->qhd", weights, v.float()).to(q.dtype)
    return out
