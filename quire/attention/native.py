"""Attention over pages in C, on a CPU: pages are read where they lie, by blocks of queries of one KV head."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quire.attention.base import Angles, StepInputs
from quire.kernels import native
from quire.kernels.paged_attention import AttentionFeatures, AttentionShape
from quire.kernels.rope_and_write import QKNormParams


@dataclass
class NativeMetadata:
    rows: torch.Tensor  # [n] int64
    query_start: torch.Tensor  # [n + 1] int32
    seq_lens: torch.Tensor  # [n] int32
    block_table: torch.Tensor
    no_positions: torch.Tensor  # for models without rotary embeddings
    shared: int  # leading keys in blocks that all rows share


class NativeBackend:
    """The cache is [blocks, 2, KV, block_size, D]; see kernels/kv_write.py."""

    name = "native"
    block_dim = 0
    supports_graphs = False
    supports_replay = True

    def __init__(self, shapes: Sequence[AttentionShape]) -> None:
        """`shapes` are those of all layers. Their partial results share one buffer: layers run one after the other."""
        self._slots = native.attention_slots(shapes)

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        return (num_blocks, 2, num_kv_heads, block_size, head_size)

    def plan_queries(self, num_tokens: np.ndarray) -> None:
        return None

    def max_query_blocks(self, num_tokens: int, num_rows: int) -> int:
        return 0

    def build(self, step: StepInputs, block_table: torch.Tensor, block_size: int) -> NativeMetadata:
        return NativeMetadata(
            step.rows.long(),
            step.query_start.int().contiguous(),
            step.seq_lens.int().contiguous(),
            block_table,
            torch.empty(0, dtype=torch.int64),
            int(step.prefix_len) if step.prefix_len is not None else 0,
        )

    def write(
        self,
        qkv: torch.Tensor,
        num_heads: int,
        qk_norm: QKNormParams | None,
        angles: Angles | None,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        metadata: NativeMetadata,
    ) -> torch.Tensor:
        table, positions = (angles.table, angles.positions) if angles is not None else (None, metadata.no_positions)
        return native.rope_and_write(qkv, num_heads, qk_norm, table, positions, kv_cache, slot_mapping)

    def attend(
        self, q: torch.Tensor, kv_cache: torch.Tensor, metadata: NativeMetadata, features: AttentionFeatures
    ) -> torch.Tensor:
        rows = (metadata.rows, metadata.query_start, metadata.seq_lens, metadata.block_table)
        shared = metadata.shared if features.window is None else 0
        return native.attention(q, kv_cache, *rows, features, self._slots, shared)

    def reset_workspace(self) -> None: ...
