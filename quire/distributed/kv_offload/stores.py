"""Connectors over stores, by name: a folder that engines share, Redis."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quire.config.transfer import ConnectorConfig
from quire.distributed.kv_connector import KVConnector
from quire.distributed.kv_offload.block_store import BlockStore
from quire.distributed.kv_offload.folder_store import FolderStore
from quire.distributed.kv_offload.store_scheduler import StoreScheduler
from quire.distributed.kv_offload.store_worker import StoreWorker
from quire.messages.kv_cache import KVCacheConfig

DISK_BYTES = 32 << 30  # unless a limit is given
FOLDER_OPTIONS = ("shared_storage_path", "disk_bytes_to_use", "num_threads")
REDIS_OPTIONS = ("url", "timeout", "ttl", "max_connections", "num_threads")
NUM_THREADS = 4
MAX_THREADS = 256  # and connections
DEADLINE = 5.0  # seconds for a lookup; more counts as a miss
LOADS_LONGER = 12  # times as long is what a load may take: it may be of gigabytes


def shared_storage_connector(config: ConnectorConfig, layout: KVCacheConfig, role: str) -> KVConnector:
    """SharedStorageConnector, which vLLM now calls ExampleConnector; `--kv-offloading-path` is one."""
    options = _options("SharedStorageConnector", config.extra, FOLDER_OPTIONS)
    path = options.get("shared_storage_path")
    if not isinstance(path, str) or not path:
        raise ValueError(f"SharedStorageConnector: shared_storage_path is {path!r}; it must be a folder")
    size = int(_number(options, "disk_bytes_to_use", DISK_BYTES, minimum=1))
    tidies = role == "worker" and config.rank == 0
    return store_connector(
        config, layout, role, lambda: FolderStore(Path(path).expanduser(), size, tidies=tidies), "disk", options
    )


def redis_connector(config: ConnectorConfig, layout: KVCacheConfig, role: str) -> KVConnector:
    """RedisConnector: of Redis or Valkey."""
    from quire.distributed.kv_offload.redis_store import RedisStore

    options = _options("RedisConnector", config.extra, REDIS_OPTIONS)
    url = options.get("url")
    if not isinstance(url, str):
        raise ValueError("RedisConnector: url is missing; it must be like redis://host:6379/0")
    ttl = options.get("ttl")

    def make() -> BlockStore:
        return RedisStore(
            url,
            timeout=_number(options, "timeout", 1.0, minimum=0.001),
            ttl=None if ttl is None else _number(options, "ttl", 0.0, minimum=0.001),
            max_connections=int(_number(options, "max_connections", 2 * NUM_THREADS, minimum=1, maximum=MAX_THREADS)),
        )

    return store_connector(config, layout, role, make, "redis", options)


def store_connector(
    config: ConnectorConfig,
    layout: KVCacheConfig,
    role: str,
    make_store: Callable[[], BlockStore],
    tier: str,
    options: Mapping[str, Any],
) -> KVConnector:
    """One side of a connector over any store, for connectors of one's own too."""
    if config.num_ranks > 1:
        # A request goes on when the rank that answers has loaded its blocks; another may not find its own.
        raise ValueError("stores of the KV cache are not available yet with several ranks; the CPU tier is")
    if not layout.chunkable:
        return KVConnector(config, layout, role)  # nothing is cached
    asynchronous = config.device != "cpu"
    deadline = max(DEADLINE, 4 * _number(options, "timeout", 0.0, minimum=0))  # of a call, for stores that have one
    if role == "scheduler":
        return StoreScheduler(config, layout, make_store(), tier, asynchronous, deadline)
    threads = int(_number(options, "num_threads", NUM_THREADS, minimum=1, maximum=MAX_THREADS))
    return StoreWorker(config, layout, make_store(), threads, asynchronous, LOADS_LONGER * deadline)


def _options(name: str, extra: dict[str, Any], allowed: tuple[str, ...]) -> dict[str, Any]:
    unknown = extra.keys() - set(allowed)
    if unknown:
        raise ValueError(f"{name} has no option {sorted(unknown)}; allowed: {', '.join(allowed)}")
    return extra


def _number(
    options: Mapping[str, Any], name: str, default: float, minimum: float, maximum: float | None = None
) -> float:
    value = options.get(name, default)
    high = sys.float_info.max if maximum is None else maximum
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not minimum <= value <= high:
        bounds = f"of at least {minimum:g}" if maximum is None else f"between {minimum:g} and {maximum:g}"
        raise ValueError(f"the KV connector's {name} is {value!r}; it must be a number {bounds}")
    return value
