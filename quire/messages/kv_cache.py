"""What a layer needs of the KV cache, and how the cache is laid out for a model."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KVCacheSpec:
    """One attention layer's cache: a page holds `block_size` tokens of keys and values."""

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype_bytes: int
    sliding_window: int | None = None  # None: full attention

    @property
    def page_bytes(self) -> int:
        return 2 * self.block_size * self.num_kv_heads * self.head_size * self.dtype_bytes


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers that share a block table. Layer i of every group is backed by physical tensor i."""

    layers: tuple[int, ...]  # model layer indices
    spec: KVCacheSpec


@dataclass(frozen=True)
class KVCacheConfig:
    """`num_blocks` usable blocks; tensors hold one more, block 0, the null block."""

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]

    @property
    def num_tensors(self) -> int:
        return max(len(group.layers) for group in self.groups)
