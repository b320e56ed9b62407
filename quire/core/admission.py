"""Admits waiting requests: finds what of their KV cache exists, allocates the rest, gives them rows."""

import time
from dataclasses import dataclass, field

from quire.core.admission_queue import AdmissionQueue
from quire.core.forks import ForkTable
from quire.core.kv_cache_manager import Hit, KVCacheManager
from quire.core.kv_transfers import NO_MATCH, KVTransfers, Match
from quire.core.prompt_features import PromptFeatures
from quire.core.request import Request, RequestState
from quire.core.row_blocks import RowBlocks
from quire.core.running_set import RunningSet
from quire.messages.plan import NewRow


@dataclass(slots=True)
class Admitted:
    """The part of a plan that is about new rows."""

    rows: list[NewRow] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)  # how far each row advances
    block_copies: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Start:
    """Where a request begins to compute, and where the KV cache of the tokens before comes from."""

    num_computed: int
    parent: Request | None = None  # shares its blocks
    hit: Hit | None = None  # None if it has blocks, or its parent's, already
    looked_up: bool = False  # the hit is the prefix cache's
    external: Match = NO_MATCH  # what a connector loads after the hit


class Admission:
    def __init__(
        self,
        kv: KVCacheManager,
        running: RunningSet,
        blocks: RowBlocks,
        queue: AdmissionQueue,
        forks: ForkTable,
        transfers: KVTransfers,
        features: PromptFeatures,
        *,
        max_model_len: int,
        chunk_limit: int,
        chunked_prefill: bool,
        num_lookahead: int = 0,
    ) -> None:
        """`num_lookahead` as the scheduler's."""
        self._kv = kv
        self._running = running
        self._blocks = blocks
        self._queue = queue
        self._forks = forks
        self._transfers = transfers
        self._features = features
        self._max_model_len = max_model_len
        self._chunk_limit = chunk_limit
        self._chunked_prefill = chunked_prefill
        self._num_lookahead = num_lookahead

    def admit(self, budget: int, plans_in_flight: bool, spare: int = 0) -> Admitted:
        """As many of the waiting requests as rows, blocks and `budget` tokens allow, or until only `spare` are left."""
        admitted = Admitted()
        for answered in self._transfers.pop_answered():
            self._queue.unblock(answered)
        while budget > spare and not self._running.full and (request := self._queue.peek()) is not None:
            count = self._admit(request, budget, admitted)
            if count is not None:
                budget -= count
            elif plans_in_flight or not self._make_room_for(request):
                break  # no room for the first request: none behind it is admitted instead
        self._kv.register_deferred()
        return admitted

    def _admit(self, request: Request, budget: int, admitted: Admitted) -> int | None:
        """How far the request advances; 0 if it must wait for its KV cache; None if there is no room."""
        known = len(request.token_ids)
        start = self._find_start(request)
        if start is None:
            self._queue.pop()
            self._queue.block(request, RequestState.WAITING_REMOTE_KV)
            return 0
        computed = start.num_computed
        count = min(known - computed, self._chunk_limit, budget)
        if request.core.features and not start.external.loads_async:
            count = self._features.limit(request, computed, count)
        if (
            not count
            or (not self._chunked_prefill and count < known - computed)
            or not self._allocate(request, start, self._end_of_step(start, count, known), admitted)
        ):
            self._features.leave(request)
            return None
        self._queue.pop()
        if start.hit is not None and not self._transfers.start(request, start.external):
            self._features.leave(request)
            return 0  # the scheduler ends it
        self._note_first_admission(request, start)
        if start.external.loads_async:
            request.num_computed = computed
            self._queue.block(request, RequestState.WAITING_REMOTE_KV)
            return 0
        admitted.rows.append(self._enter_row(request, computed))
        if request.core.features:
            self._features.enter(request, computed)
        admitted.num_tokens.append(count)
        # At once, so that the next request of this very plan finds the blocks: layers write keys before they attend.
        self._blocks.register(request, computed + count, admitting=True)
        return count

    def _end_of_step(self, start: Start, count: int, known: int) -> int:
        """Positions that blocks are needed for."""
        if start.external.loads_async:
            return start.num_computed
        end = start.num_computed + count
        return end if end < known else min(end + self._num_lookahead, max(end, self._max_model_len))

    def _find_start(self, request: Request) -> Start | None:
        """None if a connector has yet to say what it has."""
        if request.has_blocks:  # loaded by a connector
            return Start(request.num_computed)
        parent = self._forks.parent(request)
        if parent is not None and self._kv.can_fork(parent, request):
            return Start(len(request.token_ids) - 1, parent)
        if request.needs_whole_prompt:
            return Start(0, hit=self._kv.no_hit())
        hit = self._kv.find_hit(request)
        external = self._transfers.match(request, hit.num_tokens)
        if external is None:
            return None
        return Start(hit.num_tokens + external.num_tokens, None, hit, True, external)

    def _allocate(self, request: Request, start: Start, num_tokens: int, admitted: Admitted) -> bool:
        if start.parent is None:
            return self._kv.allocate(request, num_tokens, start.hit, start.num_computed)
        copies = self._kv.fork(start.parent, request, num_tokens)
        admitted.block_copies += copies or []
        return copies is not None

    def _note_first_admission(self, request: Request, start: Start) -> None:
        # A request that comes back after a preemption finds blocks that it computed itself: those are no cache hits.
        if request.num_cached >= 0:
            return
        if start.hit is not None and start.looked_up:
            self._kv.count_lookup(len(request.token_ids), start.hit)
            self._transfers.count_lookup(len(request.token_ids) - start.hit.num_tokens, start.external)
        request.num_cached = min(start.num_computed, request.num_prompt_tokens)
        request.scheduled_at = time.monotonic()

    def _enter_row(self, request: Request, computed: int) -> NewRow:
        params, pooling = request.core.sampling, request.core.pooling
        limit = self._max_model_len
        if pooling is not None:
            limit = request.num_prompt_tokens
        elif params.max_tokens is not None:
            limit = min(limit, request.num_prompt_tokens + params.max_tokens)
        request.state = RequestState.RUNNING
        # Rows are planned until they have as many tokens; the result of one that pools counts as its last.
        row = self._running.add(request, computed, limit + (pooling is not None))
        self._blocks.add(request)
        return NewRow(
            row=row,
            request_id=request.request_id,
            token_ids=request.token_ids,
            num_computed=computed,
            block_ids=request.block_ids(),
            params=params,
            seed=request.core.seed,
            num_prompt_tokens=request.num_prompt_tokens,
            stop_ids=request.stop_ids,
            token_limit=limit,
            pooling=pooling,
            lora_id=request.core.lora_id,
            features=request.core.features,
            cache_salt=request.core.cache_salt,
        )

    def _make_room_for(self, request: Request) -> bool:
        """Where nothing runs that could end, blocks can only come from another waiting request. False if that is not
        so."""
        return not len(self._running) and self.free_waiting(but=request)

    def free_waiting(self, but: Request | None = None) -> bool:
        """The blocks of the last waiting request that a connector has loaded: it loads again. False if there is none,
        or only this one."""
        last = self._queue.last_with_blocks() if self._transfers.connectors else None
        if last is None or last is but:
            return False
        self._transfers.preempt(last)
        self._kv.free(last)
        last.num_computed = 0
        return True
