"""From what the layers need and the memory there is to a KV-cache layout."""

import math

from quire.core.block_pool import BlockPool
from quire.core.kv_groups import make_group
from quire.messages.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheSpec, make_groups, shared_page_bytes


def bytes_per_block(groups: tuple[KVCacheGroup, ...]) -> int:
    return shared_page_bytes(groups) * max((len(group.layers) for group in groups), default=0)


def blocks_of_one_request(groups: tuple[KVCacheGroup, ...], max_model_len: int, max_step_tokens: int) -> int:
    pool = BlockPool(0)
    hash_size = math.gcd(*(group.spec.block_size for group in groups))
    return sum(
        make_group(i, group.spec, pool, hash_size).max_blocks(max_model_len, max_step_tokens)
        for i, group in enumerate(groups)
    )


def longest_model_len(
    groups: tuple[KVCacheGroup, ...], num_blocks: int, max_model_len: int, max_step_tokens: int
) -> int:
    """The longest request, at most `max_model_len`, that fits the cache on its own."""
    low, high = 0, max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_of_one_request(groups, middle, max_step_tokens) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low


def plan_kv_cache(specs: dict[int, KVCacheSpec], memory: int | None, num_blocks: int | None = None) -> KVCacheConfig:
    """Lay the cache out in `memory` bytes, or with exactly `num_blocks`."""
    groups = make_groups(specs)
    if not groups:
        return KVCacheConfig(0, ())
    if num_blocks is None:
        assert memory is not None
        num_blocks = memory // bytes_per_block(groups) - 1  # the null block
    if num_blocks < 1:
        raise ValueError(
            f"{max(0, memory or 0) / 2**20:.0f} MiB are left for the KV cache, less than two blocks of "
            f"{bytes_per_block(groups) / 2**20:.2f} MiB; allow more memory (--kv-cache-memory-bytes, "
            "--gpu-memory-utilization, --cpu-memory-utilization) or use a smaller model"
        )
    return KVCacheConfig(num_blocks, groups)
