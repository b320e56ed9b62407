"""The KV cache over the stages of a pipeline: each worker has the layers of its stage, all have the same blocks."""

from collections.abc import Sequence

from quire.messages.kv_cache import KVCacheConfig, KVCacheSpec, make_groups


def specs_of_all(by_rank: Sequence[dict[int, KVCacheSpec]]) -> dict[int, KVCacheSpec]:
    """By layer of the whole model."""
    return {layer: spec for specs in by_rank for layer, spec in specs.items()}


def memory_of_all(memory: Sequence[int], by_rank: Sequence[dict[int, KVCacheSpec]]) -> int:
    """Bytes for the cache of all layers, such that the part of each rank fits the memory that it has."""
    whole = KVCacheConfig(0, make_groups(specs_of_all(by_rank)))
    parts = [whole.part_of(specs) for specs in by_rank]
    blocks = min(size // (part.page_bytes * part.num_tensors) for size, part in zip(memory, parts, strict=True))
    return blocks * whole.page_bytes * whole.num_tensors
