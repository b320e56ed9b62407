"""Defaults of the configuration that depend on the device."""

import dataclasses

from quire.config import CacheConfig, EngineConfig
from quire.config.environment import VLLM_CPU_KVCACHE_SPACE
from quire.platforms import current_platform

# Where no request waits for its next token: fewer steps, and less of the host's work for each token.
POOLING_STEP_TOKENS = 4096


def with_platform_defaults(config: EngineConfig) -> EngineConfig:
    """Fill in device, dtype and step limits. `config` already has its model's."""
    platform = current_platform(config.device.device, config.device.cpu_threads)
    model, hf = config.model, config.model.hf_config
    stored = hf.get("dtype") or hf.get("torch_dtype")
    dtype = model.dtype if model.dtype != "auto" else str(platform.default_dtype(stored)).removeprefix("torch.")
    scheduler = config.scheduler
    step_tokens = platform.default_max_num_batched_tokens
    if config.pooling.setup is not None:
        step_tokens = max(step_tokens, POOLING_STEP_TOKENS)
    return config.replace(
        model=dataclasses.replace(model, dtype=dtype),
        scheduler=dataclasses.replace(
            scheduler,
            max_num_seqs=scheduler.max_num_seqs or platform.default_max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens or step_tokens,
        ),
        cache=_cache(config.cache, platform.name),
        device=dataclasses.replace(config.device, device=platform.name),
    )


def _cache(cache: CacheConfig, platform: str) -> CacheConfig:
    given = VLLM_CPU_KVCACHE_SPACE.get()
    if platform != "cpu" or not given or cache.kv_cache_memory_bytes or cache.num_gpu_blocks_override:
        return cache
    return dataclasses.replace(cache, kv_cache_memory_bytes=given)
