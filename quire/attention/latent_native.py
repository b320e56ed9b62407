"""Latent attention in C, on a CPU in bf16: absorbed; in large steps the latents of prompts are expanded by torch."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from quire.attention.base import Angles, GroupFeatures, StepInputs
from quire.attention.latent import (
    MIN_EXPANDED_QUERIES,
    LatentBackend,
    LatentFeatures,
    LatentWeights,
    attend_expanded,
    read_latents,
)
from quire.kernels import native
from quire.kernels.native import latent as kernels
from quire.kernels.rms_norm import RMSNormParams
from quire.messages.kv_cache import KVCacheSpec, LatentSpec
from quire.platforms.base import Platform


@dataclass
class NativeLatentMetadata:
    rows: torch.Tensor  # [n] int64
    query_start: torch.Tensor  # [n + 1] int32
    seq_lens: torch.Tensor  # [n] int32; 0 where latents are expanded
    block_table: torch.Tensor
    block_size: int
    expanded: list[tuple[int, int, int, int]]  # row of the table, first query, end of queries, keys


class NativeLatentBackend(LatentBackend):
    name = "native_mla"
    supports_replay = True

    @classmethod
    def supports(cls, platform: Platform, dtype: torch.dtype, spec: KVCacheSpec, features: GroupFeatures) -> str | None:
        assert isinstance(spec, LatentSpec)
        if not platform.supports_native:
            return "a CPU"
        if dtype is not torch.bfloat16 or spec.dtype != "bfloat16":
            return "a model and a cache in bfloat16"
        if spec.index_size:
            return "a cache without keys of an index"
        if native.library() is None:
            return "a C compiler"
        if spec.rank > kernels.MAX_RANK:
            return f"latents of at most {kernels.MAX_RANK}"
        if features.padded or not features.causal:
            return "pages without padding, and causal attention"
        return None

    @classmethod
    def create(cls, platform: Platform, dtype: torch.dtype, features: GroupFeatures) -> "NativeLatentBackend":
        return cls(max(shape.num_heads for shape in features.shapes), max(s.head_size for s in features.shapes))

    def __init__(self, num_heads: int, width: int) -> None:
        """The most of all layers, which share the memory of partial results."""
        self._slots = kernels.latent_slots(num_heads, width)

    def prepare(self, weights: LatentWeights) -> LatentWeights:
        if isinstance(weights.packed, kernels.PackedLatentWeights):
            return weights
        return replace(weights, packed=kernels.pack_latent_weights(weights.w_uk, weights.w_uv))

    def build(self, step: StepInputs, block_table: torch.Tensor, block_size: int) -> NativeLatentMetadata:
        rows, lens = step.rows.long(), step.seq_lens.int().contiguous()
        expanded = []
        if not step.decode_only:
            starts, keys = step.query_start.tolist(), lens.tolist()
            for i, row in enumerate(rows.tolist()):
                if starts[i + 1] - starts[i] >= MIN_EXPANDED_QUERIES and keys[i]:
                    expanded.append((row, starts[i], starts[i + 1], keys[i]))
            if expanded:
                many = step.query_start.diff() >= MIN_EXPANDED_QUERIES
                lens = lens.masked_fill(many, 0)
        return NativeLatentMetadata(rows, step.query_start.int().contiguous(), lens, block_table, block_size, expanded)

    def write(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        norm: RMSNormParams,
        angles: Angles,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        metadata: Any,
        features: LatentFeatures,
    ) -> None:
        places = (angles.table, angles.positions, kv_cache, slot_mapping)
        kernels.latent_write(q, kv, *norm, *places, features.interleaved)

    def attend(
        self,
        q: torch.Tensor,
        weights: LatentWeights,
        kv_cache: torch.Tensor,
        metadata: NativeLatentMetadata,
        features: LatentFeatures,
    ) -> torch.Tensor:
        m, sizes = metadata, (features.nope, features.rank, features.rope, features.v)
        rows = (m.rows, m.query_start, m.seq_lens, m.block_table)
        out = kernels.latent_attention(q, weights.packed, kv_cache, *rows, self._slots, sizes, features.scale)
        for row, first, end, keys in m.expanded:
            pages = m.block_table[row, : -(-keys // m.block_size)].long()
            latents = read_latents(kv_cache, pages, None, q.dtype)[:keys]
            out[first:end] = attend_expanded(q[first:end], latents, weights, features)
        return out
