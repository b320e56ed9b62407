"""Options of the paged KV cache."""

from dataclasses import dataclass

from quire.config.fields import option, validate


@dataclass
class CacheConfig:
    """The paged KV cache."""

    block_size: int = option(16, "tokens in a KV-cache block", minimum=1, maximum=1024)
    enable_prefix_caching: bool = option(True, "share the KV cache of equal prompt prefixes")
    prefix_caching_hash_algo: str = option(
        "sha256",
        "sha256 is stable across processes; xxhash is faster, with a secret key per process",
        choices=("sha256", "xxhash"),
        aliases={"sha256_cbor": "sha256", "xxhash_cbor": "xxhash"},
    )
    kv_cache_dtype: str = option(
        "auto",
        "precision of keys and values in the cache; auto: that of the model, or fp8 if the checkpoint was made for it; "
        "fp8 (GPU) and int8 hold twice as many, per_token_head with a scale for each token and head",
        choices=("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_per_token_head", "int8_per_token_head"),
    )
    gpu_memory_utilization: float = option(
        0.9, "part of the device's memory the engine may use", minimum=0.01, maximum=1.0
    )
    cpu_memory_utilization: float = option(
        0.5, "on a CPU: part of the free memory the KV cache may take", minimum=0.01, maximum=1.0
    )
    kv_cache_memory_bytes: int | None = option(
        None, "exact size of the KV cache, instead of a part of the memory", minimum=1
    )
    num_gpu_blocks_override: int | None = option(None, "exact number of KV-cache blocks", minimum=1)

    def __post_init__(self) -> None:
        validate(self)
