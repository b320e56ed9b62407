"""Decides what runs in each step.

There are no prefill and decode phases: a request has tokens and has computed some of them; a plan advances some
requests by some tokens within a budget. Plans may be made while earlier ones are in flight (asynchronous scheduling):
each keeps a snapshot of which request was in which row, and its results are read through that.
"""

import bisect
import time

import numpy as np

from quire.core.admission import Admission
from quire.core.admission_queue import AdmissionQueue
from quire.core.forks import ForkTable
from quire.core.kv_cache_manager import KVCacheManager
from quire.core.kv_transfers import Ended, KVTransfers
from quire.core.prompt_features import PromptFeatures
from quire.core.request import Request, RequestState
from quire.core.results import ConstrainedRows, ResultReader
from quire.core.row_blocks import RowBlocks
from quire.core.running_set import RunningSet
from quire.lora.residency import Residency
from quire.messages.plan import BlockAppends, ModelRunnerOutput, SchedulerOutput
from quire.messages.requests import (
    STEP_TOKEN_BOUNDS,
    EngineCoreOutputs,
    EngineCoreRequest,
    Failure,
    RequestError,
    SchedulerStats,
    invalid,
)
from quire.messages.speculation import DraftProfile
from quire.spec_decode.draft_planner import DraftPlanner

FEW_WAITING = 256  # requests, for steps of `short_step_tokens`; with more, rate counts more than when results come


class Scheduler:
    def __init__(
        self,
        kv: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        short_step_tokens: int = 0,
        policy: str = "fcfs",
        long_prefill_token_threshold: int = 0,
        chunked_prefill: bool = True,
        transfers: KVTransfers | None = None,
        num_drafts: int = 0,
        adaptive_drafts: bool = False,
        draft_profile: DraftProfile | None = None,
        encoder_cache_tokens: int | None = None,
        num_lookahead: int = 0,
        num_stages: int = 1,
        adapters: Residency | None = None,
    ) -> None:
        """`num_drafts`: the most drafts that a decoding row verifies in a step, and with `adaptive_drafts` fewer where
        more do not pay. `encoder_cache_tokens`: the most that encoder outputs hold, by default as many as a step
        computes. `num_lookahead`: positions behind those of a step that a proposer's layers write after it; without
        blocks for them drafts are worse, so no one waits for these. `num_stages`: of the pipeline, each of which has a
        plan at hand. `short_step_tokens`: see SchedulerConfig."""
        self.kv = kv
        self.max_num_batched_tokens = max_num_batched_tokens
        self._spare_tokens = max(0, max_num_batched_tokens - short_step_tokens) if short_step_tokens else 0
        self.num_drafts, self.num_lookahead, self.num_stages = num_drafts, num_lookahead, num_stages
        self.by_priority = policy == "priority"
        threshold = long_prefill_token_threshold if chunked_prefill else 0
        self.chunk_limit = threshold or max_num_batched_tokens
        self.requests: dict[str, Request] = {}
        self.queue = AdmissionQueue()
        self.running = RunningSet(max_num_seqs, max_model_len, num_drafts)
        self.blocks = RowBlocks(kv, self.running)
        self.forks = ForkTable()
        self.transfers = transfers or KVTransfers()
        self.adapters = adapters
        self.transfers.listen(kv.pool)
        self.features = PromptFeatures(encoder_cache_tokens or max_num_batched_tokens, max_num_batched_tokens)
        self.drafts = DraftPlanner(max_num_seqs, num_drafts, max_num_batched_tokens, adaptive_drafts, draft_profile)
        self.results = ResultReader(self.running, self.drafts)
        self.admission = Admission(
            kv,
            self.running,
            self.blocks,
            self.queue,
            self.forks,
            self.transfers,
            self.features,
            max_model_len=max_model_len,
            chunk_limit=self.chunk_limit,
            chunked_prefill=chunked_prefill,
            num_lookahead=num_lookahead,
        )
        self.num_preemptions = 0
        self.sleep_level = 0
        self.admits = True  # waiting requests
        self._preempted: list[int] = []  # since the last outputs
        self.failures: list[Failure] = []  # outside of a step; emptied by the caller that reports them
        self._step_tokens = [0] * (len(STEP_TOKEN_BOUNDS) + 1)
        self._step_tokens_sum = 0
        self._step = 0
        self._arrivals = 0
        self._released_rows: list[int] = []  # since the last plan
        self._common_prefix: tuple[int, ...] | None = None  # None if the running requests have changed

    # Requests come and go

    def add_request(self, core: EngineCoreRequest) -> None:
        if core.request_id in self.requests:
            raise ValueError(f"request id {core.request_id!r} is in use; ids must be unique among unfinished requests")
        self._arrivals += 1
        key = (core.priority if self.by_priority else 0, self._arrivals)
        request = Request(core, key, len(self.kv.groups))
        content = self._hold_adapter(core) if core.lora is not None else b""
        self.requests[request.request_id] = request
        parent = self.requests.get(core.fork_of) if core.fork_of is not None else None
        if parent is not None and self.forks.add(request, parent):
            self.queue.block(request, RequestState.WAITING_FORK)
        else:
            self.queue.push(request)
        if content is None:
            self.queue.block_until_ready(request)
        else:
            request.set_adapter(content)

    def _hold_adapter(self, core: EngineCoreRequest) -> bytes | None:
        """The content of its adapter; None if that has to be loaded first."""
        if self.adapters is None or core.lora is None:
            raise ValueError("the engine was started without room for adapters (--enable-lora)")
        return self.adapters.hold(core.request_id, core.lora)

    def poll_adapters(self) -> None:
        """Admit requests whose adapter is in its slot, and end those whose adapter cannot be loaded."""
        if self.adapters is None or not self.adapters.pending:
            return
        change = self.adapters.poll()
        for request_id, content in change.ready:
            request = self.requests[request_id]
            request.set_adapter(content)
            self.queue.now_ready(request)
        self._fail_outside_step([(self.requests[i], invalid(why)) for i, why in change.failed])

    def block_for_grammar(self, request_id: str) -> None:
        """Do not admit a waiting request until its grammar is compiled."""
        self.queue.block_until_ready(self.requests[request_id])

    def grammar_ready(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        if request is not None:
            self.queue.now_ready(request)

    def constrained_rows(self, plan: SchedulerOutput) -> ConstrainedRows | None:
        return self.results.constrained_rows(plan)

    def finish_requests(self, request_ids: list[str]) -> list[int]:
        """End requests for the front end (abort, stop string); unknown ids are ignored. Returns their indices."""
        found = [self.requests[i] for i in request_ids if i in self.requests]
        for request in found:
            self._end(request)
        return [request.core.index for request in found]

    def has_unfinished(self) -> bool:
        return bool(self.requests if self.admits else self.running) or self.transfers.pending

    def reset_prefix_cache(self) -> None:
        self.kv.reset_prefix_cache()
        self.features.cache.drop_unused()
        self.transfers.reset_cache()

    def forget(self, key: bytes = b"") -> None:
        """Nothing computed so far is used again: running requests compute anew. `key` enters the names of all blocks
        from now on: they hold what other weights compute. No plan may be in flight."""
        for request in reversed(self.running.all()):
            self._preempt(request)
        self._drop_waiting_blocks()
        for request in self.requests.values():
            request.block_hashes.clear()
        self.kv.change_root(key)
        self.reset_prefix_cache()
        if key:
            self.transfers.forget()

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            time=time.monotonic(),
            num_running=len(self.running),
            num_waiting=len(self.queue),
            kv_cache_usage=self.kv.pool.usage,
            num_preemptions=self.num_preemptions,
            prefix_cache_queries=self.kv.prefix_queries,
            prefix_cache_hits=self.kv.prefix_hits,
            external_cache_queries=self.transfers.num_queried,
            external_cache_hits=self.transfers.num_matched,
            num_deferred=len(self.queue.blocked),
            step_tokens=tuple(self._step_tokens),
            step_tokens_sum=self._step_tokens_sum,
            residency=self.kv.pool.residency,
            drafts=self.drafts.stats if self.num_drafts else None,
            adapters=self.adapters.stats() if self.adapters is not None else None,
            tiers=self.transfers.stats(),
            sleep_level=self.sleep_level,
        )

    def _count_tokens(self, used: int, rows: np.ndarray, computed: np.ndarray) -> None:
        """A step's prompt tokens and generated ones: a row that ends its prompt also generates its first."""
        if self.running.num_awaiting_first_token:
            used += int((computed == self.running.num_prompt_tokens[rows]).sum())
        self._step_tokens[bisect.bisect_left(STEP_TOKEN_BOUNDS, used)] += 1
        self._step_tokens_sum += used

    # A plan

    def schedule(self) -> SchedulerOutput | None:
        """The next plan, or None if nothing can run now."""
        self._step += 1
        for child in self.forks.pop_ready():
            self.queue.fork_ready(child)
        self.blocks.free_out_of_window()
        appended = BlockAppends()
        rows, counts, drafts, preempted = self._advance_running(appended)
        used = int(counts.sum())
        budget = 0 if preempted or not self.admits else self.max_num_batched_tokens - used
        spare = self._spare_tokens if len(self.queue) <= FEW_WAITING else 0
        admitted = self.admission.admit(budget, self.results.pending, spare)
        if self.transfers.failed:
            failed, self.transfers.failed = self.transfers.failed, []
            self._fail_outside_step(failed)
        if admitted.rows:
            rows = np.concatenate([rows, np.asarray([new.row for new in admitted.rows], np.int64)])
            counts = np.concatenate([counts, np.asarray(admitted.num_tokens, np.int64)])
            if self.num_drafts:
                self.drafts.add_rows([new.row for new in admitted.rows])
            if drafts is not None:
                drafts = np.concatenate([drafts, np.zeros(len(admitted.rows), np.int64)])
                if self.drafts.uniform:  # a step with prompts is captured only without drafts
                    counts, drafts = counts - drafts, np.zeros_like(drafts)
            used = int(counts.sum())
        if not len(rows) and not self.transfers.needs_plan:
            return None

        computed, samples = self.running.advance(rows, counts, drafts)
        if used:  # an empty plan only polls the connector
            self._count_tokens(used, rows, computed)
        self.blocks.register_full(rows, computed)
        requests = self.running.requests[rows]
        self.forks.note_planned(requests, computed)
        if admitted.rows or self._common_prefix is None:
            self._common_prefix = self.kv.common_prefix_blocks(self.running.all())
        plan = SchedulerOutput(
            step=self._step,
            rows=rows.astype(np.int32),
            num_tokens=counts.astype(np.int32),
            finished_rows=self._released_rows,
            new_rows=admitted.rows,
            appended=appended,
            block_copies=admitted.block_copies,
            common_prefix_blocks=self._common_prefix,
            num_drafts=drafts.astype(np.int32) if drafts is not None else None,
            features=self.features.plan(rows, counts, computed) if self.features.active else None,
        )
        self.transfers.add_meta(plan)
        self._released_rows = []
        verified = drafts if drafts is not None and drafts.any() else None
        self.results.expect(self._step, rows, requests, samples, verified)
        return plan

    def _advance_running(self, appended: BlockAppends) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, bool]:
        """Rows that run on, how far each goes, how many of those tokens are drafts (None: none are), and whether a
        request was preempted for lack of blocks."""
        run = self.running
        rows = run.order if self.num_stages == 1 else run.micro_batch(self.num_stages)
        if not len(rows) and not self.num_drafts:
            return rows, rows, None, False
        known = run.num_known(rows)
        computed = run.num_computed[rows]
        # Plans in flight may already sample a request's last token.
        certain = np.where(known < run.token_limit[rows], np.minimum(known - computed, self.chunk_limit), 0)
        planned = None
        if self.num_drafts:
            if not self.drafts.goes_on_resting():
                room = np.minimum(run.token_limit[rows] - known - 1, self.num_drafts)
                planned = self.drafts.plan(rows, certain, run.decodes(rows), room, self.max_num_batched_tokens)
            computed = run.most_computed(rows)
        counts = _within(self.max_num_batched_tokens, certain)
        if planned is not None:  # what is left: no row waits for another's drafts
            counts += _within(self.max_num_batched_tokens - int(counts.sum()), np.where(counts == certain, planned, 0))
        if self.features.active:
            self.features.limit_rows(rows, computed, counts)
        end = self._end_of_step(rows, computed + counts + self.num_lookahead)
        short = self.blocks.extend(rows, end, appended)
        if self.num_drafts and len(short):
            # Drafts are dropped before anyone is preempted for them.
            fits = [self.blocks.extend_one(run.requests[rows[i]], int(end[i]), appended) for i in short]
            short = short[~np.array(fits)]
            counts[short] = np.minimum(counts[short], certain[short])
            end = self._end_of_step(rows, computed + counts)
        preempted = len(short) > 0 and self._extend_or_preempt(rows, short, end, counts, appended)
        if preempted and self.num_drafts:
            appended.drop_rows(self._released_rows)  # what they were to write their drafts to
        drafts = np.maximum(counts - certain, 0) if planned is not None else None
        chosen = counts > 0
        if not chosen.all():
            rows, counts = rows[chosen], counts[chosen]
            drafts = drafts[chosen] if drafts is not None else None
        return rows, counts, drafts, preempted

    def _end_of_step(self, rows: np.ndarray, num_computed: np.ndarray) -> np.ndarray:
        """Positions that blocks are needed for. No row accepts drafts past its limit, so none is written far past."""
        if not self.num_drafts:
            return num_computed
        return np.minimum(num_computed, self.running.token_limit[rows] + self.num_drafts)

    def _extend_or_preempt(
        self, rows: np.ndarray, short: np.ndarray, num_tokens: np.ndarray, counts: np.ndarray, appended: BlockAppends
    ) -> bool:
        """Blocks for one row after the other; while there are too few, the last running request is preempted. True if
        one was. The only one that runs would come back to as few: blocks of those that wait are freed first."""
        run = self.running
        preempted = False
        for place in short:
            request = run.requests[rows[place]]
            while request is not None and not self.blocks.extend_one(request, int(num_tokens[place]), appended):
                if len(run) == 1 and self.admission.free_waiting():
                    continue
                victim = run.last()
                counts[rows == victim.row] = 0
                preempted = True
                self._preempt(victim)
                if victim is request:
                    request = None
        return preempted

    def _preempt(self, request: Request) -> None:
        """Free the request's row and blocks; it computes them again later, from its confirmed tokens."""
        self.num_preemptions += 1
        self._preempted.append(request.core.index)
        request.frames_to_discard = int(self.running.num_frames[request.row])
        request.prompt_planned = False
        self._leave_row(request)
        self.transfers.preempt(request)
        self.kv.free(request)
        request.num_computed = 0
        self.queue.push_preempted(request)

    # Results

    def update_from_output(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> EngineCoreOutputs:
        """Apply a plan's results: append tokens, end requests that are done, free what they held."""
        result = self.results.read(plan, output)
        for request in result.stale:
            self.queue.discard_frame(request)
        if output.transfers:
            self._end_transfers(self.transfers.update(output))
        for request in result.finished:
            self.blocks.register(request, self.running.num_ready(request.row))
            self._end(request)
        for request in result.failed:
            self._end(request, failed=True)
        if result.failed:
            # What they computed may be wrong from any position on, and part of it can be found in the cache.
            self.reset_prefix_cache()
        self.transfers.succeeded(plan)
        return self._with_stats(result.outputs)

    def note_time(self, plan: SchedulerOutput, seconds: float) -> None:
        """The plan's results came so long after those before."""
        if self.drafts.adaptive:
            drafts = 0 if plan.num_drafts is None else int(plan.num_drafts.sum())
            if len(plan.rows) and plan.total_tokens == len(plan.rows) + drafts:  # no prompts
                self.drafts.took(len(plan.rows), drafts, plan.num_drafts is None, seconds)

    def _with_stats(self, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        outputs.stats = self.stats()
        if self.kv.events is not None:
            self.kv.events.flush()
        if self._preempted:
            outputs.preempted, self._preempted = self._preempted, []
        return outputs

    def fail_plan(self, plan: SchedulerOutput, error: RequestError, connector: int | None = None) -> EngineCoreOutputs:
        """The step raised. Its requests end with the cause; all others compute again, since blocks that the failed
        step should have written may be shared with them. If a `connector` raised, its transfers end too."""
        result = self.results.fail(plan, error)
        for request in result.stale:
            self.queue.discard_frame(request)
        for request in result.failed:
            self._end(request, failed=True)
        for request in reversed(self.running.all()):
            self._preempt(request)
        if connector is not None:
            self._end_transfers(self.transfers.connector_failed(connector, error))
        self.transfers.plan_failed()
        self._drop_waiting_blocks()
        self.reset_prefix_cache()
        return self._with_stats(result.outputs)

    def _drop_waiting_blocks(self) -> None:
        """Of requests for which a connector loads, or has loaded: they may share blocks that a failed step should have
        written, or that other weights computed."""
        for request in self.requests.values():
            if request.state == RequestState.RUNNING or not request.has_blocks:
                continue
            if request.request_id in self.transfers.loading:
                request.stale = True  # a connector still writes to them
            else:
                self._free_waiting(request)

    def _free_waiting(self, request: Request) -> None:
        self.transfers.preempt(request)
        self.kv.free(request)
        request.num_computed, request.stale = 0, False

    def _end_transfers(self, ended: Ended) -> None:
        for request in ended.loaded:
            if request.stale:
                self._free_waiting(request)
            self.queue.unblock(request)
        for request in ended.released:
            self.kv.free(request)
        for request in ended.recomputed:
            self.kv.free(request)
            request.num_computed, request.num_cached, request.load_failed, request.stale = 0, -1, True, False
            self.queue.unblock(request)
        self._fail_outside_step(ended.failed)

    def _fail_outside_step(self, failed: list[tuple[Request, RequestError]]) -> None:
        for request, error in failed:
            self._end(request, failed=True)
            self.failures.append(Failure(request.request_id, request.core.index, error))

    def _end(self, request: Request, failed: bool = False) -> None:
        if request.state == RequestState.FINISHED:
            return
        if request.state == RequestState.RUNNING:
            self._leave_row(request)
        self.queue.remove(request)
        request.state = RequestState.FINISHED
        del self.requests[request.request_id]
        if self.adapters is not None:
            self.adapters.release(request.request_id)
        for child in self.forks.remove(request):
            self.queue.fork_ready(child)
        if not self.transfers.finish(request, failed):
            self.kv.free(request)

    def _leave_row(self, request: Request) -> None:
        self._released_rows.append(request.row)
        self.running.remove(request)
        if request.core.features:
            self.features.leave(request)
        self._common_prefix = None


def _within(budget: int, wanted: np.ndarray) -> np.ndarray:
    """As much as there is of what rows want, one after the other."""
    counts: np.ndarray = np.maximum(np.minimum(budget - (np.cumsum(wanted) - wanted), wanted), 0)
    return counts
