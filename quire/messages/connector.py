"""Interfaces of KV connectors, which load and save KV-cache blocks: another engine, a CPU tier, a disk."""

from collections.abc import Sequence
from typing import Any, Protocol

from quire.messages.plan import SchedulerOutput


class ConnectorRequest(Protocol):
    """The request fields that connectors may use."""

    request_id: str
    num_prompt_tokens: int
    num_computed: int  # when it has finished: tokens whose KV its blocks hold
    block_hashes: list[bytes]


class SchedulerConnector(Protocol):
    """The scheduler's side. No method may block."""

    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed: int) -> tuple[int, bool]:
        """Tokens after `num_computed` whose KV can be loaded, and whether loading is asynchronous (the request then
        waits without running)."""
        ...

    def update_state_after_alloc(
        self, request: ConnectorRequest, block_ids: list[list[int]], num_external: int
    ) -> None: ...

    def build_connector_meta(self, plan: SchedulerOutput) -> Any:
        """Metadata for the worker's side, for this plan."""
        ...

    def request_finished(self, request: ConnectorRequest, block_ids: list[list[int]]) -> bool:
        """True keeps the blocks until the worker's side reports that the request was sent."""
        ...


class WorkerConnector(Protocol):
    """The worker's side, called around one forward pass."""

    def bind(self, kv_caches: Sequence[Any]) -> None:
        """The cache tensor of each model layer."""
        ...

    def start_load_kv(self, meta: Any) -> None: ...

    def wait_for_layer_load(self, layer: int) -> None: ...

    def save_kv_layer(self, layer: int, kv_cache: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_finished(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Request ids done sending, and done receiving, since the last call."""
        ...
