"""Latent attention in bf16 on a CPU."""

from dataclasses import dataclass

import torch

from quire.kernels.native import has_amx, native_function
from quire.kernels.native.moe import pack_experts

MAX_RANK = 1024
MIN_SLOTS, ROOM = 64, 1 << 26  # partial results, and bytes for more than that many of them


@dataclass(frozen=True)
class PackedLatentWeights:
    w_uk: torch.Tensor  # [H][rank, nope]
    w_uv: torch.Tensor  # [H][v, rank]


def pack_latent_weights(w_uk: torch.Tensor, w_uv: torch.Tensor) -> PackedLatentWeights:
    """w_uk [H, nope, rank], w_uv [H, v, rank], in bf16."""
    return PackedLatentWeights(pack_experts(w_uk.transpose(1, 2)), pack_experts(w_uv))


def latent_slots(num_heads: int, rank: int) -> torch.Tensor:
    """Memory for the partial results of rows whose keys are split."""
    slot = num_heads * (rank + 2)
    return torch.empty(max(MIN_SLOTS, ROOM // (4 * slot)) * slot, dtype=torch.float32)


def latent_write(
    q: torch.Tensor,  # [N, H, nope + rope]: rotated in place
    kv: torch.Tensor,  # [N, rank + rope]
    weight: torch.Tensor,  # [rank] float32
    eps: float,
    table: torch.Tensor,  # [positions, rope]
    positions: torch.Tensor,  # [N] int64
    kv_cache: torch.Tensor,  # [pages, page_tokens, rank + rope]
    slots: torch.Tensor,  # [N] int64
    interleaved: bool,
) -> None:
    tokens, heads, query = q.shape
    rank, rope = len(weight), kv.shape[1] - len(weight)
    native_function("quire_latent_write")(
        q.data_ptr(), kv.data_ptr(), weight.data_ptr(), table.data_ptr(), positions.data_ptr(), slots.data_ptr(),
        kv_cache.data_ptr(), tokens, q.stride(0), kv.stride(0), heads, query - rope, rank, rope, eps, interleaved,
    )  # fmt: skip


def latent_attention(
    q: torch.Tensor,  # [N, H, nope + rope]
    weights: PackedLatentWeights,
    kv_cache: torch.Tensor,  # [pages, page_tokens, rank + rope]
    rows: torch.Tensor,  # [n] int64
    query_start: torch.Tensor,  # [n + 1] int32
    seq_lens: torch.Tensor,  # [n] int32; 0: the row is left out
    block_table: torch.Tensor,  # [rows, max_pages] int32
    slots: torch.Tensor,  # of latent_slots()
    sizes: tuple[int, int, int, int],  # nope, rank, rope, v
    scale: float,
) -> torch.Tensor:
    """[N, H, v]. A row's bits depend on its own inputs alone."""
    tokens, heads, _ = q.shape
    nope, rank, _, v = sizes
    latent = torch.empty(tokens, heads * rank, dtype=q.dtype)
    room = torch.empty(tokens, heads * max(nope, v), dtype=q.dtype)
    out = torch.empty(tokens, heads, v, dtype=q.dtype)
    native_function("quire_latent_attention")(
        q.data_ptr(), weights.w_uk.data_ptr(), weights.w_uv.data_ptr(), kv_cache.data_ptr(), rows.data_ptr(),
        query_start.data_ptr(), seq_lens.data_ptr(), block_table.data_ptr(), latent.data_ptr(), room.data_ptr(),
        slots.data_ptr(), out.data_ptr(), tokens, q.stride(0), block_table.stride(0), len(rows), heads, *sizes,
        kv_cache.shape[1], slots.numel() // (heads * (rank + 2)), scale, has_amx(),
    )  # fmt: skip
    return out
