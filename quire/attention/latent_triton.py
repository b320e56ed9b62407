"""Latent attention with our own Triton kernels.

Rows of one query, and steps of 1 + k to verify drafts, are absorbed. Of prompts, those without cached context are
expanded, and those with some if they are long enough and there is room for their keys; the others are absorbed too.
"""

from dataclasses import dataclass

import numpy as np
import torch

from quire.attention.base import Angles, GroupFeatures, StepInputs
from quire.attention.latent import LatentBackend, LatentFeatures, LatentWeights
from quire.attention.triton import plan_query_blocks
from quire.kernels.rms_norm import RMSNormParams
from quire.kernels.triton.latent_decode import latent_decode
from quire.kernels.triton.latent_expand import CONTEXT_BYTES, ExpansionPlan, latent_expand, min_queries, plan_expansion
from quire.kernels.triton.latent_prefill import absorbed_prefill, expanded_prefill, queries_per_block
from quire.kernels.triton.latent_product import into_latent, out_of_latent
from quire.kernels.triton.latent_write import latent_write
from quire.platforms.base import Platform

SLICE_BYTES = 192 << 20  # for latent queries and results of prompts that are absorbed, some tokens at a time


@dataclass
class TritonLatentMetadata:
    step: StepInputs
    block_table: torch.Tensor
    plan: ExpansionPlan | None = None  # made by the first layer


class TritonLatentBackend(LatentBackend):
    name = "triton_mla"
    supports_graphs = True

    @classmethod
    def create(cls, platform: Platform, dtype: torch.dtype, features: GroupFeatures) -> "TritonLatentBackend":
        return cls(features.max_rows, dtype)

    def __init__(self, max_rows: int, dtype: torch.dtype, context_bytes: int = CONTEXT_BYTES) -> None:
        self.max_rows = max_rows
        self.queries_per_block = queries_per_block(dtype)
        self.context_bytes = context_bytes

    def plan_queries(self, num_tokens: np.ndarray) -> np.ndarray:
        return plan_query_blocks(num_tokens, self.queries_per_block)

    def max_query_blocks(self, num_tokens: int, num_rows: int) -> int:
        return num_tokens // self.queries_per_block + num_rows

    def build(self, step: StepInputs, block_table: torch.Tensor, block_size: int) -> TritonLatentMetadata:
        return TritonLatentMetadata(step, block_table)

    def write(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        norm: RMSNormParams,
        angles: Angles,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        metadata: TritonLatentMetadata,
        features: LatentFeatures,
    ) -> None:
        latent_write(
            q[..., features.nope :], kv, norm, angles.table, angles.positions, kv_cache, slot_mapping,
            features.interleaved, features.kv_scales,
        )  # fmt: skip

    def attend(
        self,
        q: torch.Tensor,
        weights: LatentWeights,
        kv_cache: torch.Tensor,
        metadata: TritonLatentMetadata,
        features: LatentFeatures,
    ) -> torch.Tensor:
        step, table, scales = metadata.step, metadata.block_table, features.kv_scales
        q_nope, q_rope = q.split((features.nope, features.rope), dim=-1)
        shape = (*q.shape[:2], features.v)
        tokens, query_start, queries = None, None, 1
        if step.decode_only:
            out = torch.empty(shape, dtype=q.dtype, device=q.device)
            # Tokens that verify drafts are rows of their own, those of a row next to each other.
            queries = max(1, len(step.rows) // (len(step.query_start) - 1))
        else:
            out = torch.zeros(shape, dtype=q.dtype, device=q.device)
            if metadata.plan is None:
                metadata.plan = self._plan(metadata, kv_cache, q, features)
            self._attend_prompts(q, q_nope, q_rope, out, weights, kv_cache, metadata, metadata.plan, features)
            if not step.has_decode_rows:
                return out
            tokens, query_start = metadata.plan.decode_tokens, step.query_start
        parts = latent_decode(
            into_latent(q_nope, weights.w_uk, tokens), q_rope, kv_cache, step.rows, query_start, step.seq_lens, table,
            features.scale, scales, queries, step.prefix_len,
        )  # fmt: skip
        out_of_latent(parts, weights.w_uv, out, tokens)
        return out

    def _plan(
        self, metadata: TritonLatentMetadata, kv_cache: torch.Tensor, q: torch.Tensor, features: LatentFeatures
    ) -> ExpansionPlan:
        step, (_, heads, _) = metadata.step, q.shape
        context = self.context_bytes // (heads * (features.nope + features.v) * q.element_size())
        return plan_expansion(
            step.rows, step.query_start, step.seq_lens, metadata.block_table, kv_cache.shape[1], len(q), context,
            min_queries(features.rank, features.nope, features.v), self.max_rows,
        )  # fmt: skip

    def _attend_prompts(
        self,
        q: torch.Tensor,
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        out: torch.Tensor,
        weights: LatentWeights,
        kv_cache: torch.Tensor,
        metadata: TritonLatentMetadata,
        plan: ExpansionPlan,
        features: LatentFeatures,
    ) -> None:
        step, scales = metadata.step, features.kv_scales
        assert step.query_blocks is not None
        expanded = latent_expand(kv_cache, plan, weights.w_uk, weights.w_uv, features.rope, scales)
        rows = (step.query_start, step.seq_lens)
        expanded_prefill(q, out, expanded, plan, step.query_blocks, *rows, features.scale)
        del expanded
        count = max(self.queries_per_block, SLICE_BYTES // (2 * q.shape[1] * features.rank * q.element_size()))
        for first in range(0, len(q), count):
            tokens = plan.prompt_tokens[first : first + count]
            queries = into_latent(q_nope, weights.w_uk, tokens, many=True)
            latent = absorbed_prefill(
                queries, q_rope, kv_cache, plan, step.query_blocks, step.rows, *rows,
                metadata.block_table, first, features.scale, scales,
            )  # fmt: skip
            out_of_latent(latent, weights.w_uv, out, tokens, many=True)
