"""Attention over pages with our own Triton kernels: decode rows, prompts and mixed steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quire.attention.base import Angles, AttentionBackend, GroupFeatures, StepInputs
from quire.kernels.kv_scales import KVScales
from quire.kernels.paged_attention import AttentionFeatures, AttentionShape
from quire.kernels.rope_and_write import QKNormParams, rope_and_write
from quire.kernels.triton.paged_decode import DecodeWorkspace, paged_decode
from quire.kernels.triton.paged_prefill import paged_prefill, queries_per_block
from quire.messages.kv_cache import FullAttentionSpec, SlidingWindowSpec
from quire.platforms.base import Platform

NO_QUERY_BLOCKS = np.full((1, 2), -1, np.int32)


def plan_query_blocks(num_tokens: np.ndarray, queries_per_block: int) -> np.ndarray:
    """[blocks, 2] int32: (row of the step, first query), for rows of more than one token. A row's later blocks have
    more keys and come first, so that the longest do not run last."""
    rows = np.flatnonzero(num_tokens > 1)
    if not len(rows):
        return NO_QUERY_BLOCKS
    counts = -(-num_tokens[rows] // queries_per_block)
    last = np.cumsum(counts)
    block = np.arange(last[-1]) - np.repeat(last - counts, counts)
    order = np.argsort(-block, kind="stable")
    plan = np.stack((np.repeat(rows, counts), block * queries_per_block), axis=1)
    return plan[order].astype(np.int32)


@dataclass
class TritonMetadata:
    step: StepInputs
    block_table: torch.Tensor


class TritonBackend(AttentionBackend):
    name = "triton"
    kinds = (FullAttentionSpec, SlidingWindowSpec)
    supports_graphs = True

    @classmethod
    def create(cls, platform: Platform, dtype: torch.dtype, features: GroupFeatures) -> "TritonBackend":
        return cls(features.max_rows, features.shapes, dtype, platform.device)

    def __init__(
        self, max_rows: int, shapes: Sequence[AttentionShape], dtype: torch.dtype, device: torch.device
    ) -> None:
        """`shapes` of all layers: a step's blocks of queries are planned once, so the largest group decides."""
        self.queries_per_block = min(queries_per_block(shape.group, dtype) for shape in shapes)
        self.workspace = DecodeWorkspace(max_rows, shapes, device)

    def plan_queries(self, num_tokens: np.ndarray) -> np.ndarray:
        return plan_query_blocks(num_tokens, self.queries_per_block)

    def max_query_blocks(self, num_tokens: int, num_rows: int) -> int:
        return num_tokens // self.queries_per_block + num_rows

    def build(self, step: StepInputs, block_table: torch.Tensor, block_size: int) -> TritonMetadata:
        return TritonMetadata(step, block_table)

    def write(
        self,
        qkv: torch.Tensor,
        num_heads: int,
        qk_norm: QKNormParams | None,
        angles: Angles | None,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        metadata: TritonMetadata,
        scales: KVScales | None = None,
    ) -> torch.Tensor:
        table, positions = (angles.table, angles.positions) if angles is not None else (None, None)
        return rope_and_write(qkv, num_heads, qk_norm, table, positions, kv_cache, slot_mapping, scales)

    def attend(
        self, q: torch.Tensor, kv_cache: torch.Tensor, metadata: TritonMetadata, features: AttentionFeatures
    ) -> torch.Tensor:
        step, table = metadata.step, metadata.block_table
        out = torch.empty_like(q)
        if not step.decode_only:
            assert step.query_blocks is not None
            paged_prefill(
                q, out, kv_cache, step.query_blocks, step.rows, step.query_start, step.seq_lens, table, features,
                queries=self.queries_per_block,
            )  # fmt: skip
        if step.has_decode_rows:
            paged_decode(
                q, out, kv_cache, step.rows, None if step.decode_only else step.query_start, step.seq_lens, table,
                self.workspace, features, prefix_len=step.prefix_len if features.window is None else None,
            )  # fmt: skip
        return out

    def reset_workspace(self) -> None:
        self.workspace.reset()
