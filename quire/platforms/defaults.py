"""Defaults of the configuration that depend on the device."""

import dataclasses

from quire.config import CacheConfig, EngineConfig
from quire.config.environment import VLLM_CPU_KVCACHE_SPACE
from quire.config.transfer import STORES, TransferConfig
from quire.platforms import current_platform
from quire.platforms.base import Platform
from quire.platforms.host_claims import HostClaims

MIN_OFFLOADING_GIB, MAX_OFFLOADING_GIB = 2, 64

# Where no request waits for its next token: fewer steps, and less of the host's work for each token.
POOLING_STEP_TOKENS = 4096


def with_platform_defaults(config: EngineConfig) -> EngineConfig:
    """Fill in device, dtype and step limits. `config` already has its model's."""
    platform = current_platform(config.device.device, config.device.cpu_threads)
    model, hf = config.model, config.model.hf_config
    stored = hf.get("dtype") or hf.get("torch_dtype")
    dtype = model.dtype if model.dtype != "auto" else str(platform.default_dtype(stored)).removeprefix("torch.")
    scheduler = config.scheduler
    step_tokens, short_step_tokens = platform.default_max_num_batched_tokens, 0
    if config.pooling.setup is not None:
        step_tokens = max(step_tokens, POOLING_STEP_TOKENS)
        if scheduler.max_num_batched_tokens is None:
            short_step_tokens = platform.short_step_tokens
    return config.replace(
        model=dataclasses.replace(model, dtype=dtype),
        scheduler=dataclasses.replace(
            scheduler,
            max_num_seqs=scheduler.max_num_seqs or platform.default_max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens or step_tokens,
            short_step_tokens=short_step_tokens,
        ),
        cache=_cache(config.cache, platform.name),
        transfer=_transfer(config, platform),
        device=dataclasses.replace(config.device, device=platform.name),
    )


def _cache(cache: CacheConfig, platform: str) -> CacheConfig:
    given = VLLM_CPU_KVCACHE_SPACE.get()
    if platform != "cpu" or not given or cache.kv_cache_memory_bytes or cache.num_gpu_blocks_override:
        return cache
    return dataclasses.replace(cache, kv_cache_memory_bytes=given)


def _transfer(config: EngineConfig, platform: Platform) -> TransferConfig:
    transfer, ranks = config.transfer, config.parallel.num_ranks
    size = transfer.kv_offloading_size
    if (size or transfer.kv_offloading_path) and not config.cache.enable_prefix_caching:
        raise ValueError(
            "kv_offloading_size and kv_offloading_path keep blocks that the prefix cache can find; "
            "enable_prefix_caching must be on (--kv-offloading-size, --kv-offloading-path, --enable-prefix-caching)"
        )
    if config.cache.prefix_caching_hash_algo != "sha256" and any(one.name in STORES for one in transfer.connectors):
        raise ValueError(
            "what a KV-cache store holds is found by hashes that other processes compute too: prefix_caching_hash_algo "
            f"must be sha256 with it, not {config.cache.prefix_caching_hash_algo}"
        )
    is_default = size is None
    if size is None:
        size = 0.0
        # Not beside connectors of the user's, nor with executors that have none. Texts to pool share too little.
        own_process = config.parallel.distributed_executor_backend in (None, "uni") and ranks == 1
        helps = config.cache.enable_prefix_caching and config.pooling.setup is None
        if platform.has_own_memory and own_process and helps and not transfer.connectors:
            size = default_offloading_gib(HostClaims(), config.parallel.data_parallel_size)
    return dataclasses.replace(
        transfer,
        kv_offloading_size=size,
        kv_offloading_is_default=is_default,
        device=platform.name,
        num_ranks=ranks,
    )


def default_offloading_gib(claims: HostClaims, num_engines: int = 1) -> float:
    """By the host memory that is free for this process and not claimed; `num_engines` start together and share it."""
    try:
        share = claims.share()
    except RuntimeError:
        return 0.0
    size = min(share / 2**30 / num_engines, MAX_OFFLOADING_GIB)
    return size if size >= MIN_OFFLOADING_GIB else 0.0
