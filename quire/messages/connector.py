"""Interfaces of KV connectors, which load and save KV-cache blocks: another engine, a CPU tier, a disk."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from quire.messages.kv_transfer import ConnectorMetadata, ConnectorReport, FinishedTransfers, TierStats
from quire.messages.plan import SchedulerOutput


class ConnectorRequest(Protocol):
    """The request fields that connectors may use."""

    request_id: str
    num_prompt_tokens: int
    num_computed: int  # when it has finished or was preempted: tokens whose KV its blocks hold
    num_cached: int  # prompt tokens found when it was first admitted; -1 until then
    block_hashes: list[bytes]

    @property
    def num_tokens(self) -> int:
        """While it waits: its prompt, and what it generated before it was preempted."""
        ...


class SchedulerConnector(Protocol):
    """The scheduler's side. No method may block. One that raises ends its request, never the engine; where nothing
    depends on it, the error is only logged.

    Blocks whose content is about to be lost (eviction, preemption) may be read in `start_load_kv` of the next plan,
    which comes before anything else of that plan.
    """

    hears_registered: bool  # wants block_registered, which costs a call for every full block

    @property
    def recomputes_failed_loads(self) -> bool:
        """Else a request whose blocks could not be loaded ends with an error."""
        ...

    @property
    def wants_plan(self) -> bool:
        """Whether an idle engine is to make a plan for its metadata."""
        ...

    def bind_scheduler(self, ask_again: Callable[[str], None]) -> None:
        """`ask_again` is to be called, from any thread, with the id of a request whose match is known by now."""
        ...

    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed: int) -> tuple[int | None, bool]:
        """Tokens after `num_computed` whose KV can be loaded, and whether loading is asynchronous (the request then
        waits without running). None: not known yet; the request is set aside until `ask_again`. May be called again for
        the same request; of several connectors, the one with the most tokens loads."""
        ...

    def update_state_after_alloc(
        self, request: ConnectorRequest, block_ids: list[list[int]], num_external: int
    ) -> None:
        """The request has blocks, by group; this connector is to load `num_external` tokens of them."""
        ...

    def build_connector_meta(self, plan: SchedulerOutput) -> ConnectorMetadata | None:
        """For the worker's side, with this plan; None if it has nothing to start."""
        ...

    def request_finished(self, request: ConnectorRequest, block_ids: list[list[int]]) -> bool:
        """True keeps the blocks until the worker's side reports that the request was sent."""
        ...

    def request_preempted(self, request: ConnectorRequest, block_ids: list[list[int]]) -> None:
        """Its blocks are freed, and are computed or loaded again when it comes back."""
        ...

    def request_failed(self, request: ConnectorRequest) -> None:
        """It ended with an error: what its blocks hold may be wrong."""
        ...

    def block_registered(self, block_id: int, block_hash: bytes, group: int) -> None:
        """The block can be found by its content, which is there once the plan that is being made, or one before it,
        has run: from `start_load_kv` of the next plan on. If it is evicted before, `block_evicted` comes between."""
        ...

    def block_evicted(self, block_id: int, block_hash: bytes, group: int) -> None:
        """The block of that content is allocated anew: the next plan overwrites it."""
        ...

    def plan_succeeded(self, step: int) -> None:
        """Results of the plan of that step were applied: what it computed is right. Where a plan fails, `reset_cache`
        is called instead."""
        ...

    def reset_cache(self) -> None:
        """Drop all content: the user asked for it, or a step has failed and what was computed may be wrong."""
        ...

    def forget(self) -> None:
        """Beside `reset_cache`, if the user asked for it: content that was right then must not be found either, since
        the weights may be others."""
        ...

    def worker_reported(self, report: ConnectorReport) -> None:
        """From the worker's side, with the results of a step; of several ranks, that of the one that answers."""
        ...

    def stats(self) -> TierStats | None:
        """Called with every step's results, so it must be cheap."""
        ...

    def close(self) -> None:
        """The engine ends; no plan is made any more."""
        ...


class WorkerConnector(Protocol):
    """The worker's side, called around each forward pass. One that raises has ended all its transfers: the requests of
    the step, and those it was loading, end with the error."""

    by_layer: bool  # wants wait_for_layer_load and save_kv_layer, without which graphs and replay stay on

    def bind(self, kv_caches: Mapping[int, Any], notify: Callable[[], None]) -> None:
        """The cache tensor of each model layer, whose first dimension is the block. `notify` is to be called, from any
        thread, once `get_finished` has something to report: an idle engine waits for that."""
        ...

    def bind_pages(self, pages: Sequence[Any]) -> None:
        """Before `bind`: the cache as it lies in memory. Tensor i [blocks, page] backs layer i of every group."""
        ...

    def start_load_kv(self, meta: ConnectorMetadata) -> None:
        """Before the step changes anything. Sends of finished requests begin here too: all that computes their blocks
        is enqueued."""
        ...

    def wait_for_layer_load(self, layer: int) -> None: ...

    def save_kv_layer(self, layer: int, kv_cache: Any) -> None: ...

    def wait_for_save(self) -> None:
        """After a forward pass that did not raise, or in its place if the plan has no rows."""
        ...

    def get_finished(self) -> FinishedTransfers:
        """Since the last call; called with the results of every step."""
        ...

    def close(self) -> None:
        """The engine ends; no step is started any more."""
        ...
