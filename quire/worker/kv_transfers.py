"""The worker's dealings with its KV connectors: the hooks around a step, one connector after the other."""

import functools
from collections.abc import Callable, Mapping, Sequence

import torch

from quire.messages.connector import WorkerConnector
from quire.messages.kv_transfer import ConnectorError, ConnectorMetadata, FailedMetadata, FinishedTransfers


class WorkerTransfers:
    """A hook is called for every connector before an error of one is raised: the others' transfers go on."""

    def __init__(self, connectors: Sequence[WorkerConnector]) -> None:
        self.connectors = connectors
        self._finished = [FinishedTransfers() for _ in connectors]  # read, and not reported yet
        self._layered = [(i, connector) for i, connector in enumerate(connectors) if connector.by_layer]

    @property
    def layer_hooks(self) -> "WorkerTransfers | None":
        """None if every connector works on whole steps."""
        return self if self._layered else None

    def bind(
        self, kv_caches: Mapping[int, torch.Tensor], pages: Sequence[torch.Tensor], notify: Callable[[], None]
    ) -> None:
        self._kv_caches = kv_caches
        for connector in self.connectors:
            connector.bind_pages(pages)
            connector.bind(kv_caches, notify)

    def start(self, metadata: Sequence[ConnectorMetadata | None]) -> None:
        self._for_each(lambda i, connector: _start(connector, metadata[i]))

    def finish_step(self) -> None:
        self._for_each(lambda _, connector: connector.wait_for_save())

    def close(self) -> None:
        self._for_each(lambda _, connector: connector.close())

    def wait_for_layer_load(self, layer: int) -> None:
        for i, connector in self._layered:
            self._call(i, functools.partial(connector.wait_for_layer_load, layer))

    def save_kv_layer(self, layer: int, kv_cache: torch.Tensor) -> None:
        for i, connector in self._layered:
            self._call(i, functools.partial(connector.save_kv_layer, layer, self._kv_caches[layer]))

    def get_finished(self) -> tuple[FinishedTransfers, ...]:
        """By connector."""

        def read(i: int, connector: WorkerConnector) -> None:
            new, old = connector.get_finished(), self._finished[i]
            if new:
                self._finished[i] = old.with_later(new)

        self._for_each(read)
        finished = tuple(self._finished)
        if any(finished):
            self._finished = [FinishedTransfers() for _ in self.connectors]
        return finished

    def _for_each(self, hook: Callable[[int, WorkerConnector], None]) -> None:
        first: ConnectorError | None = None
        for i, connector in enumerate(self.connectors):
            try:
                self._call(i, functools.partial(hook, i, connector))
            except ConnectorError as error:
                first = first or error
        if first is not None:
            raise first

    def _call(self, connector: int, hook: Callable[[], None]) -> None:
        try:
            hook()
        except Exception as error:
            name = type(self.connectors[connector]).__name__
            raise ConnectorError(connector, f"KV connector {name}: {type(error).__name__}: {error}") from error


def _start(connector: WorkerConnector, meta: ConnectorMetadata | None) -> None:
    if isinstance(meta, FailedMetadata):
        raise RuntimeError(meta.error)
    if meta is not None:
        connector.start_load_kv(meta)
