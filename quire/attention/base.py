"""The interface between models, attention backends and the runner.

A layer calls `Attention.forward(q, k, v, ctx)`. A backend is chosen once per KV-cache group; its metadata is built once
per step per group and travels in the explicit ForwardContext.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass
class StepInputs:
    """One step's batch as every backend sees it: n rows, N tokens in all, rows one after the other."""

    num_rows: int
    num_tokens: int
    query_start: torch.Tensor  # [n + 1] int32: where each row's tokens begin
    seq_lens: torch.Tensor  # [n] int32: context length including this step's tokens
    max_query_len: int
    max_seq_len: int  # an upper bound known to the host
    common_prefix_blocks: tuple[int, ...] = ()  # per group, leading blocks that all rows share


class LayerHooks(Protocol):
    """A KV connector that works layer by layer."""

    def wait_for_layer_load(self, layer: int) -> None: ...

    def save_kv_layer(self, layer: int, kv_cache: torch.Tensor) -> None: ...


@dataclass
class ForwardContext:
    """Everything a forward pass needs beside ids and positions. Explicit: no module-level state."""

    step: StepInputs
    metadata: list[Any]  # per group, what the group's backend built
    slot_mapping: list[
        torch.Tensor
    ]  # per group, [N] int64: block * block_size + offset; 0.. of the null block for padding
    layer_hooks: LayerHooks | None = None


class AttentionBackend(Protocol):
    """Kernels for one KV-cache group. Stateless but for what the constructor fixes."""

    name: str

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """Shape of one layer's cache tensor; `num_blocks` includes the null block and is dimension `block_dim`."""
        ...

    block_dim: int

    def build(self, step: StepInputs, block_table: torch.Tensor, block_size: int) -> Any:
        """Metadata of a step. block_table: [n, max_blocks] int32, the rows of this step."""
        ...

    def forward(
        self,
        q: torch.Tensor,  # [N, heads, head_size]
        k: torch.Tensor,  # [N, kv_heads, head_size]
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        metadata: Any,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:  # [N, heads, head_size]
        """Write k and v to the cache, then attend. Every key of the step is written before any query attends."""
        ...
