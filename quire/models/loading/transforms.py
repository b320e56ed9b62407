"""Transforms of checkpoint tensors into the layout of the shared decoder, applied while loading."""

import torch

from quire.models.loading.weight_map import Transform


def plus_one(weight: torch.Tensor) -> torch.Tensor:
    """For norms that multiply by 1 + weight."""
    return weight + 1


def transposed(weight: torch.Tensor) -> torch.Tensor:
    """For linears that are stored [inputs, outputs]; a bias is unchanged."""
    return weight.t() if weight.dim() == 2 else weight


class RowOrder:
    """A transform that only reorders rows, so that it also applies to quantized rows."""

    def __init__(self, reorder: Transform) -> None:
        self.reorder = reorder

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.reorder(rows)


def qkv_by_head(num_kv_heads: int, head_dim: int) -> RowOrder:
    """For a fused tensor stored per KV head (its queries, its key, its value) -> all queries, all keys, all values."""

    def apply(fused: torch.Tensor) -> torch.Tensor:
        by_head = fused.view(num_kv_heads, -1, head_dim, *fused.shape[1:])
        parts = by_head[:, :-2].flatten(0, 2), by_head[:, -2].flatten(0, 1), by_head[:, -1].flatten(0, 1)
        return torch.cat(parts)

    return RowOrder(apply)


def halves_from_pairs(head_dim: int, rotary_dim: int | None = None) -> RowOrder:
    """For queries and keys with interleaved rotary pairs in a head's first `rotary_dim` rows -> first halves, then
    second halves. Both are reordered alike, so that attention scores do not change."""
    rotary_dim = rotary_dim or head_dim
    order = [*range(0, rotary_dim, 2), *range(1, rotary_dim, 2), *range(rotary_dim, head_dim)]

    def apply(rows: torch.Tensor) -> torch.Tensor:
        return rows.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)

    return RowOrder(apply)


def of_queries_and_keys(order: RowOrder, num_rows: int) -> RowOrder:
    """Apply `order` to the first `num_rows` of a fused tensor only: queries and keys, not values."""
    return RowOrder(lambda fused: torch.cat((order(fused[:num_rows]), fused[num_rows:])))


def in_each_row(transform: Transform) -> Transform:
    """For weights that a family has as [heads, head_dim]."""
    return lambda weight: transform(weight.flatten()).view_as(weight)
