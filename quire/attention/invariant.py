"""Attention for `--batch-invariant` on a GPU: a query's result depends on its keys alone, to the bit."""

from collections.abc import Sequence

import torch

from quire.attention.triton import TritonBackend, TritonMetadata
from quire.kernels.paged_attention import AttentionFeatures, AttentionShape
from quire.kernels.triton.invariant_attention import PartsWorkspace, invariant_attention, queries_per_block


class InvariantBackend(TritonBackend):
    name = "triton_invariant"

    def __init__(
        self, max_rows: int, shapes: Sequence[AttentionShape], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.queries_per_block = min(queries_per_block(shape.group, dtype) for shape in shapes)
        self.parts = PartsWorkspace(max_rows, shapes, device)

    def attend(
        self, q: torch.Tensor, kv_cache: torch.Tensor, metadata: TritonMetadata, features: AttentionFeatures
    ) -> torch.Tensor:
        """A prefix that rows share is attended to once for each."""
        step, out = metadata.step, torch.empty_like(q)
        starts = None if step.decode_only else step.query_start
        batch = (step.rows, starts, step.seq_lens, metadata.block_table, self.parts, features)
        if not step.decode_only:
            assert step.query_blocks is not None
            invariant_attention(q, out, kv_cache, step.query_blocks, *batch, queries=self.queries_per_block)
        if step.has_decode_rows:
            invariant_attention(q, out, kv_cache, None, *batch)
        return out

    def reset_workspace(self) -> None:
        self.parts.reset()
