"""KV-cache specification per layer, and the layout of a model's cache.

`make_groups` is here because core and worker both need it: the core to lay out the cache, the worker to measure memory
before there is a layout.
"""

from collections import defaultdict
from dataclasses import dataclass, replace


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


def make_groups(specs: dict[int, KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Group layers of equal kind so that one pool of equal pages serves all groups.

    All groups have as many layers as the smallest kind (a kind with more is split, its last group possibly padded),
    and a kind with smaller tokens gets larger blocks until pages have the same size.
    """
    kinds: dict[KVCacheSpec, list[int]] = defaultdict(list)
    for layer, spec in sorted(specs.items()):
        kinds[spec].append(layer)
    page = max(spec.page_bytes for spec in kinds)
    size = min(len(layers) for layers in kinds.values())
    groups = []
    for spec, layers in kinds.items():
        if page % spec.page_bytes:
            raise ValueError(
                f"KV-cache pages of {spec.page_bytes} and {page} bytes cannot share a pool: one must divide the other"
            )
        spec = replace(spec, block_size=spec.block_size * (page // spec.page_bytes))
        groups += [KVCacheGroup(tuple(layers[i : i + size]), spec) for i in range(0, len(layers), size)]
    return tuple(groups)
