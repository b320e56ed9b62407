"""KV connectors by name, and the base class of all: a connector that does nothing."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.config.transfer import ConnectorConfig, TransferConfig
from quire.messages.connector import ConnectorRequest
from quire.messages.kv_cache import KVCacheConfig
from quire.messages.kv_transfer import ConnectorMetadata, ConnectorReport, FinishedTransfers, TierStats
from quire.messages.plan import SchedulerOutput


class KVConnector:
    """Both sides; a connector overrides the methods it needs (messages/connector.py says when each is called). `role`
    is "scheduler" or "worker", and `layout` gives the layers and block size of each KV-cache group."""

    by_layer = False
    hears_registered = False
    wants_plan = False

    def __init__(self, config: ConnectorConfig, layout: KVCacheConfig, role: str) -> None:
        self.config = config
        self.layout = layout
        self.role = role

    @property
    def recomputes_failed_loads(self) -> bool:
        return self.config.load_failure_policy == "recompute"

    def bind_scheduler(self, ask_again: Callable[[str], None]) -> None: ...

    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: ConnectorRequest, block_ids: list[list[int]], num_external: int
    ) -> None: ...

    def build_connector_meta(self, plan: SchedulerOutput) -> ConnectorMetadata | None:
        return None

    def request_finished(self, request: ConnectorRequest, block_ids: list[list[int]]) -> bool:
        return False

    def request_preempted(self, request: ConnectorRequest, block_ids: list[list[int]]) -> None: ...

    def request_failed(self, request: ConnectorRequest) -> None: ...

    def block_registered(self, block_id: int, block_hash: bytes, group: int) -> None: ...

    def block_evicted(self, block_id: int, block_hash: bytes, group: int) -> None: ...

    def plan_succeeded(self, step: int) -> None: ...

    def reset_cache(self) -> None: ...

    def forget(self) -> None: ...

    def worker_reported(self, report: ConnectorReport) -> None: ...

    def stats(self) -> TierStats | None:
        return None

    def bind_pages(self, pages: Sequence[Any]) -> None: ...

    def bind(self, kv_caches: Mapping[int, Any], notify: Callable[[], None]) -> None: ...

    def start_load_kv(self, meta: ConnectorMetadata) -> None: ...

    def wait_for_layer_load(self, layer: int) -> None: ...

    def save_kv_layer(self, layer: int, kv_cache: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_finished(self) -> FinishedTransfers:
        return FinishedTransfers()

    def close(self) -> None: ...


_REGISTERED = {
    "noop": "quire.distributed.kv_connector:KVConnector",
    "OffloadingConnector": "quire.distributed.kv_offload.offloading:offloading_connector",
    "SharedStorageConnector": "quire.distributed.kv_offload.stores:shared_storage_connector",
    "ExampleConnector": "quire.distributed.kv_offload.stores:shared_storage_connector",  # vLLM's name of today
    "RedisConnector": "quire.distributed.kv_offload.stores:redis_connector",
}


def register_connector(name: str, path: str) -> None:
    """Let `kv_connector` name the class `path`, as module:Class; for plugins."""
    _REGISTERED[name] = path


def make_connectors(config: TransferConfig, layout: KVCacheConfig, role: str, rank: int = 0) -> list[Any]:
    """One side of each configured connector, in order; the worker's of that rank."""
    return [_class(one.name)(replace(one, rank=rank), layout, role) for one in config.connectors]


def _class(name: str) -> Callable[[ConnectorConfig, KVCacheConfig, str], Any]:
    module, _, attribute = _REGISTERED.get(name, name).partition(":")
    if not attribute:
        raise ValueError(
            f"kv_connector {name!r} is not available yet; allowed: {', '.join(_REGISTERED)}, or your own as "
            "'module:Class'"
        )
    try:
        found: Callable[[ConnectorConfig, KVCacheConfig, str], Any] = getattr(
            importlib.import_module(module), attribute
        )
    except (ImportError, AttributeError) as error:
        raise ValueError(f"kv_connector {name!r} cannot be imported: {error}") from error
    return found
