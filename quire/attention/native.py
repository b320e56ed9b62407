"""Attention over pages in C, on a CPU: pages are read where they lie, by blocks of queries of one KV head."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.attention.base import Angles, AttentionBackend, GroupFeatures, StepInputs
from quire.attention.simple_pages import needs_simple_pages
from quire.kernels import native
from quire.kernels.kv_scales import KVScales
from quire.kernels.paged_attention import AttentionFeatures, AttentionShape
from quire.kernels.rope_and_write import QKNormParams
from quire.messages.kv_cache import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from quire.platforms.base import Platform


@dataclass
class NativeMetadata:
    rows: torch.Tensor  # [n] int64
    query_start: torch.Tensor  # [n + 1] int32
    seq_lens: torch.Tensor  # [n] int32
    block_table: torch.Tensor
    no_positions: torch.Tensor  # for models without rotary embeddings
    shared: int  # leading keys in blocks that all rows share


class NativeBackend(AttentionBackend):
    name = "native"
    kinds = (FullAttentionSpec, SlidingWindowSpec)
    supports_replay = True

    @classmethod
    def supports(cls, platform: Platform, dtype: torch.dtype, spec: KVCacheSpec, features: GroupFeatures) -> str | None:
        if not platform.supports_native:
            return "a CPU"
        if dtype not in native.TYPES:
            return "float32 or bfloat16"
        if native.library() is None:
            return "a C compiler"
        if not all(native.attention_fits(s.num_heads, s.num_kv_heads, s.head_size) for s in features.shapes):
            return "heads of at most 256, and at most 192 of them to a KV head"
        return needs_simple_pages(dtype, spec, features, quantized=("int8",))

    @classmethod
    def declines(cls, platform: Platform, dtype: torch.dtype, features: GroupFeatures) -> str | None:
        return None if dtype is torch.bfloat16 else "in float32 torch's own products are faster"

    @classmethod
    def create(cls, platform: Platform, dtype: torch.dtype, features: GroupFeatures) -> "NativeBackend":
        return cls(features.shapes)

    def __init__(self, shapes: Sequence[AttentionShape]) -> None:
        """`shapes` are those of all layers. Their partial results share one buffer: layers run one after the other."""
        self._slots = native.attention_slots(shapes)

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
        scales: KVScales | None = None,
    ) -> torch.Tensor:
        table, positions = (angles.table, angles.positions) if angles is not None else (None, metadata.no_positions)
        return native.rope_and_write(qkv, num_heads, qk_norm, table, positions, kv_cache, slot_mapping, scales)

    def attend(
        self, q: torch.Tensor, kv_cache: torch.Tensor, metadata: NativeMetadata, features: AttentionFeatures
    ) -> torch.Tensor:
        rows = (metadata.rows, metadata.query_start, metadata.seq_lens, metadata.block_table)
        shared = metadata.shared if features.window is None else 0
        return native.attention(q, kv_cache, *rows, features, self._slots, shared)
