"""The scheduler's dealings with a KV connector: which requests' blocks are being loaded or sent."""

from collections.abc import Sequence

from quire.core.request import Request
from quire.messages.connector import SchedulerConnector
from quire.messages.plan import ModelRunnerOutput, SchedulerOutput


class KVTransfers:
    """Without a connector nothing is ever loaded or sent."""

    def __init__(self, connector: SchedulerConnector | None = None) -> None:
        self.connector = connector
        self.loading: dict[str, Request] = {}  # not running until their blocks are loaded
        self.sending: dict[str, Request] = {}  # finished; their blocks are kept until the transfer ends

    @property
    def pending(self) -> bool:
        """Whether steps must go on, even empty ones, for the worker's side to report what has ended."""
        return bool(self.loading or self.sending)

    def match(self, request: Request, num_computed: int) -> tuple[int, bool]:
        """How many tokens after `num_computed` can be loaded, leaving one to compute, and whether the request must wait
        for them."""
        if self.connector is None:
            return 0, False
        count, loads_async = self.connector.get_num_new_matched_tokens(request, num_computed)
        count = min(count, len(request.token_ids) - 1 - num_computed)
        return count, loads_async and count != 0

    def start(self, request: Request, num_external: int, loads_async: bool) -> None:
        """The request has blocks for the `num_external` tokens that `match` found."""
        if self.connector is None:
            return
        self.connector.update_state_after_alloc(request, request.block_ids(), num_external)
        if loads_async:
            self.loading[request.request_id] = request

    def add_meta(self, plan: SchedulerOutput) -> None:
        """Let the plan carry what the worker's side needs."""
        if self.connector is not None:
            plan.connector_meta = self.connector.build_connector_meta(plan)

    def finish(self, request: Request, failed: bool) -> bool:
        """The request has ended. Whether its blocks must be kept until a transfer ends."""
        is_loading = self.loading.pop(request.request_id, None) is not None
        if self.connector is None or failed:
            return False
        keep = self.connector.request_finished(request, request.block_ids()) or is_loading
        if keep:
            self.sending[request.request_id] = request
        return keep

    def update(self, output: ModelRunnerOutput) -> tuple[Sequence[Request], Sequence[Request]]:
        """By the worker's report: requests whose blocks are loaded, and finished ones whose blocks can be freed."""
        if self.connector is None:
            return (), ()
        received, sent = output.finished_recving, output.finished_sending
        loaded = [self.loading.pop(request_id) for request_id in received if request_id in self.loading]
        kept = [self.sending.pop(request_id) for request_id in (*sent, *received) if request_id in self.sending]
        return loaded, kept
