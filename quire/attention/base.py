"""The interface between models, attention backends and the runner.

A layer calls `Attention.forward(qkv, ctx, ...)`. Each KV-cache group has a backend (selector.py); its metadata is built
once per step per group and travels in the explicit ForwardContext.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from quire.kernels.kv_scales import KVScales
from quire.kernels.paged_attention import AttentionFeatures, AttentionShape
from quire.kernels.rope import gather_cos_sin
from quire.kernels.rope_and_write import QKNormParams
from quire.messages.kv_cache import KVCacheSpec
from quire.platforms.base import Platform


@dataclass
class StepInputs:
    """One step's batch as every backend sees it: n rows, N tokens in all, rows one after the other."""

    rows: torch.Tensor  # [n]: rows of the block tables; -1: padding
    num_tokens: int
    query_start: torch.Tensor  # [n + 1] int32: where each row's tokens begin
    seq_lens: torch.Tensor  # [n] int32: context length including this step's tokens; 0 for padding
    decode_only: bool  # every row has one token
    query_blocks: torch.Tensor | None = None  # the result of the backend's plan_queries
    prefix_len: torch.Tensor | None = None  # [1] int32: leading tokens in blocks that all rows share; None: too few
    has_decode_rows: bool = True  # False: every row has several tokens
    spans: torch.Tensor | None = None  # [2, N], of attention without a cache on a GPU; set by the first layer


class Angles:
    """Rotary angles of a step's tokens: the table and positions, or the values gathered from it."""

    def __init__(self, table: torch.Tensor, positions: torch.Tensor) -> None:
        self.table = table  # [positions, R]: cosines of R / 2 angles, then sines
        self.positions = positions  # [N]

    @cached_property
    def cos_sin(self) -> tuple[torch.Tensor, torch.Tensor]:
        return gather_cos_sin(self.table, self.positions)


class LayerHooks(Protocol):
    """A KV connector that works layer by layer."""

    def wait_for_layer_load(self, layer: int) -> None: ...

    def save_kv_layer(self, layer: int, kv_cache: torch.Tensor) -> None: ...


@dataclass
class ForwardContext:
    """Everything a forward pass needs beside ids and positions. Explicit: no module-level state."""

    step: StepInputs
    metadata: list[Any]  # per group, what the group's backend built
    slot_mapping: list[torch.Tensor]  # per group, [N]: block * block_size + offset; in the null block for padding
    layer_hooks: LayerHooks | None = None
    adapters: bool = False  # linear layers add the terms of adapters, which fused ones do not
    # The residual stream [N, hidden] that enters a layer, for those of the keys; the model sets the values.
    streams: dict[int, torch.Tensor | None] | None = None


@dataclass(frozen=True)
class GroupFeatures:
    """What the layers of a KV-cache group need of their backend, beside their kind of cache."""

    shapes: tuple[AttentionShape, ...]
    max_rows: int
    causal: bool = True
    padded: bool = False  # pages do not follow one another without gaps


class CacheBackend:
    """Kernels for layers with a part in the KV cache. What a layer calls beside these is between it and its backends
    (for attention: AttentionBackend)."""

    name: ClassVar[str]
    kinds: ClassVar[tuple[type[KVCacheSpec], ...]]  # of cache
    supports_graphs: ClassVar[bool] = False  # its steps can be captured in CUDA graphs
    supports_replay: ClassVar[bool] = False  # its calls can be recorded on a CPU and replayed (worker/recorded.py)
    max_page_tokens: ClassVar[int | None] = None  # a larger block is several pages to the kernels; None: any size

    @classmethod
    def supports(cls, platform: Platform, dtype: torch.dtype, spec: KVCacheSpec, features: GroupFeatures) -> str | None:
        """What it needs to serve the group and lacks, as in "a GPU"; None: nothing. `spec` is of one of its kinds."""
        return None

    @classmethod
    def declines(cls, platform: Platform, dtype: torch.dtype, features: GroupFeatures) -> str | None:
        """Why it should not be chosen unless it is requested, though it could serve; None: it should."""
        return None

    @classmethod
    def create(cls, platform: Platform, dtype: torch.dtype, features: GroupFeatures) -> "CacheBackend":
        """One for all groups that it serves: `features.shapes` are those of their layers."""
        return cls()

    def plan_queries(self, num_tokens: np.ndarray) -> np.ndarray | None:
        """Blocks of queries that the device will work on, from the tokens by row; None if the backend needs none."""
        return None

    def max_query_blocks(self, num_tokens: int, num_rows: int) -> int:
        """The upper limit on entries of plan_queries for a step of this size."""
        return 0

    def build(self, step: StepInputs, block_table: torch.Tensor, block_size: int) -> Any:
        """Metadata of a step. block_table: [rows, max_blocks] int32, of which `step.rows` are in the step."""
        raise NotImplementedError

    def reset_workspace(self) -> None:
        """After a failed step: reset the memory that launches share."""


class AttentionBackend(CacheBackend):
    """Attention over pages [blocks, 2, KV, block_size, D] (kernels/kv_write.py)."""

    def write(
        self,
        qkv: torch.Tensor,  # [N, (heads + 2 * kv_heads) * head_size]
        num_heads: int,
        qk_norm: QKNormParams | None,
        angles: Angles | None,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        metadata: Any,
        scales: KVScales | None = None,
    ) -> torch.Tensor:  # q [N, heads, head_size]
        """Apply norm and rotary embedding to queries and keys, where given, and write keys and values to the cache."""
        raise NotImplementedError

    def attend(
        self, q: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, features: AttentionFeatures
    ) -> torch.Tensor:  # [N, heads, head_size]
        """Over the pages of each row, this step's own keys among them."""
        raise NotImplementedError
