"""What is published about the KV cache, in the shapes that vLLM 0.32's subscribers read (msgpack)."""

from typing import Any

import msgspec

MEDIUM_GPU = "GPU"  # the device's cache, whatever the device is
HASH_MASK = (1 << 64) - 1


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """One event; its class's name is its tag."""


class BlockStored(KVCacheEvent):
    """Consecutive blocks of one text can be found in the cache."""

    block_hashes: list[int]
    parent_block_hash: int | None  # of the block before the first; None: they begin the text
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None  # by block, what beside tokens is in its hash
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(KVCacheEvent):
    """Blocks were evicted."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent):
    """The cache is empty."""


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The events of a step."""

    ts: float  # seconds since the epoch
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def published_hash(block_hash: bytes) -> int:
    """64 bits: what vLLM publishes unless told otherwise."""
    return int.from_bytes(block_hash, "big") & HASH_MASK
