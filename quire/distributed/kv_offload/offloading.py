"""The connector that keeps blocks in host memory (`--kv-offloading-size`), under vLLM's name, OffloadingConnector."""

import logging
from typing import Any

from quire.config.transfer import ConnectorConfig
from quire.distributed.kv_connector import KVConnector
from quire.distributed.kv_offload.eviction import POLICIES
from quire.distributed.kv_offload.tier_scheduler import TierScheduler
from quire.distributed.kv_offload.tier_worker import TierWorker
from quire.messages.kv_cache import KVCacheConfig
from quire.platforms.host_claims import HostClaims

logger = logging.getLogger("quire")

OPTIONS = ("cpu_bytes_to_use", "eviction_policy")
WITHOUT_EFFECT = ("block_size", "spec_name")  # vLLM's: blocks here are the cache's own, and this is the one tier


def offloading_connector(config: ConnectorConfig, layout: KVCacheConfig, role: str) -> KVConnector:
    """One side of it. On a GPU copies overlap steps."""
    num_bytes, policy = read_options(config.extra)
    if not layout.chunkable:
        return KVConnector(config, layout, role)  # nothing is cached
    slot_bytes = layout.num_tensors * layout.page_bytes
    num_slots = num_bytes // config.num_ranks // slot_bytes
    if num_slots < 1:
        raise ValueError(
            f"the KV cache's CPU tier has {num_bytes} bytes, but a block has {slot_bytes} on each of "
            f"{config.num_ranks} ranks; give it more (--kv-offloading-size, cpu_bytes_to_use)"
        )
    asynchronous = config.device != "cpu"
    if role == "scheduler":
        if not config.shrinks and num_bytes > (free := HostClaims().free()):
            raise ValueError(
                f"the KV cache's CPU tier would have {num_bytes / 2**30:.2f} GiB, but {free / 2**30:.2f} GiB of "
                "host memory are free; give it less (--kv-offloading-size, cpu_bytes_to_use)"
            )
        logger.info("CPU tier of the KV cache: %d blocks (%.2f GiB), %s", num_slots, num_bytes / 2**30, policy)
        return TierScheduler(config, layout, num_slots, slot_bytes, policy, asynchronous)
    return TierWorker(config, layout, num_slots, asynchronous)


def read_options(extra: dict[str, Any]) -> tuple[int, str]:
    """Bytes of all ranks, and the eviction policy."""
    unknown = extra.keys() - {*OPTIONS, *WITHOUT_EFFECT}
    if unknown:
        raise ValueError(f"OffloadingConnector has no option {sorted(unknown)}; allowed: {', '.join(OPTIONS)}")
    num_bytes, policy = extra.get("cpu_bytes_to_use"), extra.get("eviction_policy", "lru")
    if isinstance(num_bytes, bool) or not isinstance(num_bytes, (int, float)) or not num_bytes >= 1:
        raise ValueError(f"OffloadingConnector: cpu_bytes_to_use is {num_bytes!r}; it must be a number of bytes")
    if policy not in POLICIES:
        raise ValueError(f"OffloadingConnector: eviction_policy is {policy!r}; allowed: {', '.join(POLICIES)}")
    return int(num_bytes), policy
