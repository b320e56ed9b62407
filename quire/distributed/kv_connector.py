"""KV connectors by name: their scheduler and worker sides, and one that does nothing."""

import importlib
from collections.abc import Sequence
from typing import Any

from quire.messages.connector import ConnectorRequest, SchedulerConnector, WorkerConnector
from quire.messages.plan import SchedulerOutput


class NoopConnector:
    """Both sides of a connector that loads and saves nothing: tests that the hooks by themselves change nothing."""

    def __init__(self, role: str) -> None:
        self.role = role

    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: ConnectorRequest, block_ids: list[list[int]], num_external: int
    ) -> None: ...

    def build_connector_meta(self, plan: SchedulerOutput) -> None: ...

    def request_finished(self, request: ConnectorRequest, block_ids: list[list[int]]) -> bool:
        return False

    def bind(self, kv_caches: Sequence[Any]) -> None: ...

    def start_load_kv(self, meta: Any) -> None: ...

    def wait_for_layer_load(self, layer: int) -> None: ...

    def save_kv_layer(self, layer: int, kv_cache: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_finished(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return (), ()


_BUILT_IN = {"noop": "quire.distributed.kv_connector:NoopConnector"}


def _connector(name: str, role: str) -> Any:
    path = _BUILT_IN.get(name, name)
    module, _, attribute = path.partition(":")
    if not attribute:
        raise ValueError(f"kv_connector is {name!r}; allowed: {', '.join(_BUILT_IN)}, or your own as 'module:Class'")
    try:
        return getattr(importlib.import_module(module), attribute)(role)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"kv_connector {name!r} cannot be imported: {error}") from error


def scheduler_connector(name: str | None) -> SchedulerConnector | None:
    connector: SchedulerConnector | None = _connector(name, "scheduler") if name else None
    return connector


def worker_connector(name: str | None) -> WorkerConnector | None:
    connector: WorkerConnector | None = _connector(name, "worker") if name else None
    return connector
