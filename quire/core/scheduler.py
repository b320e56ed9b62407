"""Decides what runs in each step.

There are no prefill and decode phases: a request has tokens and has computed some of them; a plan advances some
requests by some tokens within a budget. Plans may be made while earlier ones are in flight (asynchronous scheduling):
each keeps a snapshot of who was in which row, and its results are read through that.
"""

import bisect
import time
from collections import deque

import msgspec
import numpy as np

from quire.core.kv_cache_manager import Hit, KVCacheManager
from quire.core.request import Request, RequestState
from quire.core.results import Frame, select_logprobs, take_back_tokens
from quire.core.running_set import RunningSet
from quire.core.waiting_queue import WaitingQueue
from quire.messages.connector import SchedulerConnector
from quire.messages.plan import BlockAppends, ModelRunnerOutput, NewRow, SchedulerOutput
from quire.messages.requests import (
    STEP_TOKEN_BOUNDS,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    RequestError,
    SchedulerStats,
)

NOT_FINISHED, STOP, LENGTH = (np.int8(r) for r in (FinishReason.NONE, FinishReason.STOP, FinishReason.LENGTH))


class Scheduler:
    def __init__(
        self,
        kv: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: str = "fcfs",
        long_prefill_token_threshold: int = 0,
        chunked_prefill: bool = True,
        connector: SchedulerConnector | None = None,
    ) -> None:
        self.kv = kv
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.by_priority = policy == "priority"
        cut_at = long_prefill_token_threshold if chunked_prefill else 0
        self.chunk_limit = cut_at or max_num_batched_tokens
        self.chunked_prefill = chunked_prefill
        self.connector = connector
        self.running = RunningSet(max_num_seqs, max_model_len, len(kv.window_groups))
        self.waiting = WaitingQueue()
        self.blocked: dict[str, Request] = {}  # waiting for something other than room
        self.requests: dict[str, Request] = {}
        self.sending: dict[str, Request] = {}  # finished, blocks kept until a connector has read them
        self.num_preemptions = 0
        self.num_prompt_tokens = 0  # of requests that got their first token
        self.num_generated_tokens = 0
        self._step_tokens = [0] * (len(STEP_TOKEN_BOUNDS) + 1)
        self._step_tokens_sum = 0
        self._step = 0
        self._arrivals = 0
        self._frames: deque[Frame] = deque()
        self._released_rows: list[int] = []
        self._siblings: dict[str, list[Request]] = {}  # first of `n` -> those that will fork from it
        self._forkable: list[str] = []  # requests whose prompt the last plan completed
        self._draining: set[Request] = set()  # preempted, with plans in flight
        self._started: set[Request] = set()  # scheduled, without a token so far
        self._common_prefix: tuple[int, ...] | None = None

    # Requests come and go

    def add_request(self, core: EngineCoreRequest) -> None:
        if core.request_id in self.requests:
            raise ValueError(f"request id {core.request_id!r} is in use; ids must be unique among unfinished requests")
        self._arrivals += 1
        key = (core.priority if self.by_priority else 0, self._arrivals)
        request = Request(core, self._arrivals, key, len(self.kv.groups))
        self.requests[request.request_id] = request
        first = self.requests.get(core.fork_of) if core.fork_of is not None else None
        if first is not None and not first.prompt_planned:
            self._siblings.setdefault(first.request_id, []).append(request)
            self.blocked[request.request_id] = request
        else:
            request.state = RequestState.WAITING
            self.waiting.push(request)

    def block_for_grammar(self, request_id: str) -> None:
        """Hold a waiting request back until its grammar is compiled."""
        request = self.requests[request_id]
        request.awaits_grammar = True
        if request.state == RequestState.WAITING:  # else it waits for its sibling's prompt first
            self.waiting.remove(request)
            request.state = RequestState.WAITING_GRAMMAR
            self.blocked[request_id] = request

    def grammar_ready(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        if request is not None:
            request.awaits_grammar = False
            if request.state == RequestState.WAITING_GRAMMAR:
                self.unblock(request_id)

    def constrained_rows(self, plan: SchedulerOutput) -> list[tuple[int, int]] | None:
        """Rows of the newest plan that get a token under a grammar, as (place, index of the request). None while a
        token before that one is still in flight."""
        run, frame = self.running, self._frames[-1]
        assert frame.step == plan.step, "only the newest plan can wait for its masks"
        live = frame.samples & (run.generation[frame.rows] == frame.generations)
        places = np.flatnonzero(live & run.constrained[frame.rows])
        rows = frame.rows[places]
        if (run.num_pending[rows] > 1).any():
            return None
        return list(zip(places.tolist(), run.index[rows].tolist(), strict=True))

    def unblock(self, request_id: str) -> None:
        request = self.blocked.pop(request_id, None)
        if request is not None:
            request.awaits_grammar = False
            request.state = RequestState.WAITING
            self.waiting.push(request)

    def finish_requests(self, request_ids: list[str]) -> list[int]:
        """End requests at the front end's wish (abort, stop string); unknown ids are ignored. Returns their indices."""
        found = [self.requests[i] for i in request_ids if i in self.requests]
        for request in found:
            self._end(request)
        return [request.core.index for request in found]

    def has_unfinished(self) -> bool:
        return bool(self.requests or self.sending)

    def reset_prefix_cache(self) -> None:
        self.kv.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            time=time.monotonic(),
            num_running=len(self.running),
            num_waiting=len(self.waiting) + len(self.blocked),
            kv_cache_usage=self.kv.pool.usage,
            num_preemptions=self.num_preemptions,
            prefix_cache_queries=self.kv.prefix_queries,
            prefix_cache_hits=self.kv.prefix_hits,
            step_tokens=tuple(self._step_tokens),
            step_tokens_sum=self._step_tokens_sum,
        )

    # A plan

    def schedule(self) -> SchedulerOutput | None:
        """The next plan, or None if nothing can run now."""
        self._step += 1
        self._release_siblings()
        run = self.running
        self._give_up_window_blocks()
        appended = BlockAppends()
        rows, take, preempted = self._advance_running(appended)
        used = int(take.sum())
        new_rows: list[NewRow] = []
        copies: list[tuple[int, int]] = []
        if not preempted:
            new_take = self._admit_waiting(self.max_num_batched_tokens - used, new_rows, copies)
            if new_rows:
                rows = np.concatenate([rows, np.fromiter((r.row for r in new_rows), np.int64, len(new_rows))])
                take = np.concatenate([take, np.asarray(new_take, np.int64)])
                used += sum(new_take)
        if not len(rows) and not self._awaits_connector():
            return None

        known = run.num_tokens[rows] + run.num_pending[rows]
        computed = run.num_computed[rows] + take
        samples = computed == known
        run.num_computed[rows] = computed
        run.num_pending[rows] += samples
        run.num_frames[rows] += 1
        self._step_tokens[bisect.bisect_left(STEP_TOKEN_BOUNDS, used)] += 1
        self._step_tokens_sum += used
        self._register_full_blocks(rows)
        self._note_planned_prompts(rows, computed)
        if new_rows or self._common_prefix is None:
            self._common_prefix = self.kv.common_prefix_blocks(run.all())
        plan = SchedulerOutput(
            step=self._step,
            rows=rows.astype(np.int32),
            num_tokens=take.astype(np.int32),
            finished_rows=self._released_rows,
            new_rows=new_rows,
            appended=appended,
            block_copies=copies,
            common_prefix_blocks=self._common_prefix,
        )
        if self.connector is not None:
            plan.connector_meta = self.connector.build_connector_meta(plan)
        self._released_rows = []
        self._frames.append(Frame(self._step, rows, run.generation[rows], run.requests[rows], samples))
        return plan

    def _advance_running(self, appended: BlockAppends) -> tuple[np.ndarray, np.ndarray, bool]:
        """Rows that run on, how far each goes, and whether blocks ran out and someone had to leave."""
        run = self.running
        rows = run.order
        known = run.num_tokens[rows] + run.num_pending[rows]
        computed = run.num_computed[rows]
        # Plans in flight may already sample a request's last token.
        want = np.where(known < run.token_limit[rows], np.minimum(known - computed, self.chunk_limit), 0)
        ahead = np.cumsum(want) - want
        take = np.maximum(np.minimum(self.max_num_batched_tokens - ahead, want), 0)
        missing = computed + take - run.capacity[rows]
        short = np.flatnonzero(missing > 0)
        preempted = False
        if len(short) and not self._grow_by_one(rows[short], int(missing.max()), appended):
            preempted = self._grow_or_preempt(rows, short, computed + take, take, appended)
        chosen = take > 0
        return (rows, take, preempted) if chosen.all() else (rows[chosen], take[chosen], preempted)

    def _grow_by_one(self, rows: np.ndarray, most_missing: int, appended: BlockAppends) -> bool:
        """The usual case, done at once: every row needs one more block of the only group, and there are enough."""
        size = self.kv.groups[0].block_size
        if len(self.kv.groups) > 1 or most_missing > size or len(rows) > self.kv.pool.num_free:
            return False
        requests = self.running.requests
        for row, block in zip(rows.tolist(), self.kv.pool.allocate(len(rows)), strict=True):
            table = requests[row].blocks[0]
            appended.add(row, 0, len(table), block.id)
            table.append(block)
        self.running.capacity[rows] += size
        return True

    def _grow_or_preempt(
        self, rows: np.ndarray, short: np.ndarray, target: np.ndarray, take: np.ndarray, appended: BlockAppends
    ) -> bool:
        """Blocks for one row after the other; who is to be served last leaves if they run out. True if someone did."""
        run = self.running
        preempted = False
        for i in short:
            request = run.requests[rows[i]]
            while request is not None and not self._grow(request, int(target[i]), appended):
                victim = run.last()
                take[rows == victim.row] = 0
                preempted = True
                self._preempt(victim)
                if victim is request:
                    request = None
        return preempted

    def _grow(self, request: Request, num_tokens: int, appended: BlockAppends) -> bool:
        before = [len(blocks) for blocks in request.blocks]
        if not self.kv.allocate(request, num_tokens):
            return False
        for group, (start, blocks) in enumerate(zip(before, request.blocks, strict=True)):
            for position in range(start, len(blocks)):
                appended.add(request.row, group, position, blocks[position].id)
        self.running.capacity[request.row] = self.kv.capacity(request)
        return True

    def _preempt(self, request: Request) -> None:
        """Take the request's row and blocks; it computes them again later, from its confirmed tokens."""
        row = request.row
        request.frames_to_discard = int(self.running.num_frames[row])
        request.prompt_planned = False
        self.num_preemptions += 1
        self._leave_row(request)
        self.kv.free(request)
        request.state = RequestState.WAITING
        if request.frames_to_discard:
            self.blocked[request.request_id] = request
            self._draining.add(request)
        else:
            self.waiting.push(request)

    def _admit_waiting(self, budget: int, new_rows: list[NewRow], copies: list[tuple[int, int]]) -> list[int]:
        take: list[int] = []
        while budget > 0 and not self.running.full and (request := self.waiting.peek()) is not None:
            if any(preempted.key < request.key for preempted in self._draining):
                break  # whoever had to leave comes back before anyone behind it gets its blocks
            count = self._admit(request, budget, new_rows, copies)
            if count is None and not self._make_room_for(request):
                break  # no room for the first in line: nobody passes it
            if count:
                take.append(count)
                budget -= count
        return take

    def _admit(
        self, request: Request, budget: int, new_rows: list[NewRow], copies: list[tuple[int, int]]
    ) -> int | None:
        """Give the request a row and blocks. How far it advances; 0 if it must wait for its KV; None if there is no
        room."""
        known = len(request.token_ids)
        forked = None if request.has_blocks else self._fork_source(request)
        external, loads_async = 0, False
        if request.has_blocks:  # a connector brought its KV
            hit, computed = None, request.num_computed
        elif forked is not None:
            hit, computed = None, known - 1
        else:
            # Logprobs of the prompt need all of it computed here.
            cacheable = request.core.params.prompt_logprobs is None
            hit = self.kv.find_hit(request) if cacheable else self.kv.no_hit()
            computed = hit.num_tokens
            if self.connector is not None and cacheable:
                external, loads_async = self.connector.get_num_new_matched_tokens(request, computed)
                external = min(external, known - 1 - computed)
                computed += external
        count = min(known - computed, self.chunk_limit, budget)
        if not self.chunked_prefill and count < known - computed:
            return None
        target = computed if loads_async and external else computed + count
        if not self._allocate_for(request, forked, hit, target, computed, copies):
            return None
        self.waiting.pop()
        if self.connector is not None and hit is not None:
            self.connector.update_state_after_alloc(request, request.block_ids(), external)
        if request.num_cached < 0:
            # Who comes back after a preemption finds what it computed itself: that says nothing about the cache.
            if hit is not None and self.kv.hasher is not None:
                self.kv.prefix_queries += known
                self.kv.prefix_hits += hit.num_tokens
            request.num_cached = min(computed, request.num_prompt_tokens)
            request.scheduled_at = time.monotonic()
            self._started.add(request)
        if loads_async and external:
            request.num_computed = computed
            request.state = RequestState.WAITING_REMOTE_KV
            self.blocked[request.request_id] = request
            return 0
        new_rows.append(self._enter_row(request, computed))
        # At once, so that the next request of this very plan finds the blocks: layers write keys before they attend.
        self._register(request, min(computed + count, known))
        return count

    def _make_room_for(self, request: Request) -> bool:
        """Nothing runs that could end, so blocks can only come from another waiting request that a connector has loaded
        for; the last of those loads again. False if that is not so."""
        if self.connector is None or len(self.running) or self._frames:
            return False
        waiting = (r for r in self.requests.values() if r.state == RequestState.WAITING and r is not request)
        holders = [r for r in waiting if r.has_blocks]
        if not holders:
            return False
        last = max(holders, key=lambda r: r.key)
        self.kv.free(last)
        last.num_computed = 0
        return True

    def _allocate_for(
        self,
        request: Request,
        forked: Request | None,
        hit: Hit | None,
        target: int,
        computed: int,
        copies: list[tuple[int, int]],
    ) -> bool:
        if forked is None:
            return self.kv.allocate(request, target, hit, computed)
        made = self.kv.fork(forked, request)
        copies += made or []
        return made is not None

    def _enter_row(self, request: Request, computed: int) -> NewRow:
        params = request.core.params
        limit = self.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, request.num_prompt_tokens + params.max_tokens)
        request.state = RequestState.RUNNING
        row = self.running.add(request, computed, limit, self.kv.capacity(request))
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
        )

    # Forks

    def _fork_source(self, request: Request) -> Request | None:
        """The sibling whose blocks the request can share, if an earlier plan has computed them."""
        if request.core.fork_of is None or len(request.token_ids) != request.num_prompt_tokens:
            return None
        first = self.requests.get(request.core.fork_of)
        if first is None or not first.prompt_planned or request.num_prompt_tokens < 2:
            return None
        return first if self.kv.can_fork(first, request) else None

    def _note_planned_prompts(self, rows: np.ndarray, computed: np.ndarray) -> None:
        if not self._siblings:
            return
        for row, count in zip(rows, computed, strict=True):
            request = self.running.requests[row]
            if not request.prompt_planned and count >= request.num_prompt_tokens:
                request.prompt_planned = True
                self._forkable.append(request.request_id)

    def _release_siblings(self) -> None:
        for first in self._forkable:
            for request in self._siblings.pop(first, ()):
                self._leave_fork(request)
        self._forkable = []

    def _leave_fork(self, request: Request) -> None:
        if request.state == RequestState.FINISHED:
            return
        if request.awaits_grammar:
            request.state = RequestState.WAITING_GRAMMAR
        else:
            self.unblock(request.request_id)

    # Blocks

    def _give_up_window_blocks(self) -> None:
        """Free blocks that no query from the confirmed position on can see."""
        run = self.running
        rows = run.order
        if not self.kv.window_groups or not len(rows):
            return
        next_query = np.minimum(run.num_computed[rows], run.num_tokens[rows] - 1)
        moved = np.zeros(len(rows), bool)
        for floor, group in zip(run.window_floor, self.kv.window_groups, strict=True):
            assert group.window is not None
            first = np.maximum(next_query - group.window + 1, 0) // group.block_size
            moved |= first > floor[rows]
            floor[rows] = first
        for i in np.flatnonzero(moved):
            self.kv.release_out_of_window(run.requests[rows[i]], int(next_query[i]))

    def _register_full_blocks(self, rows: np.ndarray) -> None:
        """Blocks full of confirmed tokens whose KV is computed, or will be by plans made so far, can be found from now
        on."""
        run = self.running
        if self.kv.hasher is None:
            return
        size = self.kv.hasher.block_size
        ready = np.minimum(run.num_computed[rows], run.num_tokens[rows])
        done = run.num_registered[rows]
        full = np.flatnonzero(ready // size > done // size)
        if not len(full):
            return
        rows, ready, done = rows[full], ready[full], done[full]
        run.num_registered[rows] = ready
        for row, start, stop in zip(rows.tolist(), done.tolist(), ready.tolist(), strict=True):
            self.kv.register(run.requests[row], run.token_ids[row], start, stop)

    def _register(self, request: Request, ready: int) -> None:
        run, row = self.running, request.row
        self.kv.register(request, run.token_ids[row], int(run.num_registered[row]), ready)
        run.num_registered[row] = ready

    # Results

    def update_from_output(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> EngineCoreOutputs:
        """Take in a plan's results: append tokens, find who ended, free what they held."""
        run = self.running
        frame = self._frames.popleft()
        assert frame.step == plan.step, "results must be taken in the order of their plans"
        live = run.generation[frame.rows] == frame.generations
        if not live.all():
            self._discard_stale(frame, live)
        run.num_frames[frame.rows[live]] -= 1
        if self.connector is not None:
            self._take_connector_news(output)

        sampled = np.flatnonzero(live & frame.samples)
        rows = frame.rows[sampled]
        tokens = output.token_ids[sampled, 0]
        at = run.num_tokens[rows]
        run.token_ids[rows, at] = tokens
        run.num_tokens[rows] = at + 1
        run.num_pending[rows] -= 1

        stopped = (run.stop_ids[:, rows] == tokens).any(axis=0)
        finish = np.where(stopped, STOP, np.where(at + 1 >= run.token_limit[rows], LENGTH, NOT_FINISHED))
        missing = np.flatnonzero(tokens < 0)
        if len(missing):
            finish[missing] = NOT_FINISHED
        outputs = EngineCoreOutputs(
            index=run.index[rows],
            token_ids=tokens,
            offsets=np.arange(len(rows) + 1, dtype=np.int32),
            finish=finish,
            num_cached=run.num_cached[rows],
            logprobs=select_logprobs(output.logprobs, sampled),
            prompt_logprobs=[
                msgspec.structs.replace(part, owner=int(run.index[frame.rows[part.owner]]))
                for part in output.prompt_logprobs
                if live[part.owner]
            ],
        )
        self.num_generated_tokens += len(rows)
        if self._started:
            for place in np.flatnonzero(run.scheduled_at[rows]).tolist():
                self._note_first_token(run.requests[rows[place]], place, outputs)
        for i in np.flatnonzero(finish):
            request = run.requests[rows[i]]
            if stopped[i] and (request.core.params.ignore_eos or tokens[i] not in request.core.eos_token_ids):
                outputs.stop_reasons[int(i)] = int(tokens[i])
            self._register(request, int(min(run.num_computed[rows[i]], run.num_tokens[rows[i]])))
            self._end(request)
        if len(missing):
            self._fail_without_token(rows, missing, outputs)
        outputs.stats = self.stats()
        return outputs

    def _fail_without_token(self, rows: np.ndarray, places: np.ndarray, outputs: EngineCoreOutputs) -> None:
        """Rows whose logits named no token end, alone. What they computed may be wrong from any position on, and part
        of it can be found in the cache: forget all that."""
        take_back_tokens(outputs, places)
        for place in places.tolist():
            self._end(self.running.requests[rows[place]], failed=True)
        self.kv.reset_prefix_cache()

    def _note_first_token(self, request: Request, place: int, outputs: EngineCoreOutputs) -> None:
        outputs.scheduled[place] = request.scheduled_at
        self._started.discard(request)
        request.scheduled_at = self.running.scheduled_at[request.row] = 0.0
        if request.core.fork_of is None:
            self.num_prompt_tokens += request.num_prompt_tokens

    def fail_plan(self, plan: SchedulerOutput, error: RequestError) -> EngineCoreOutputs:
        """The step raised. Its requests end with the cause; all others compute again, since blocks that the failed
        step should have written may be shared with them."""
        frame = self._frames.popleft()
        assert frame.step == plan.step
        live = self.running.generation[frame.rows] == frame.generations
        self._discard_stale(frame, live)
        failed = list(frame.requests[live])
        for request in failed:
            self._end(request, failed=True)
        for request in reversed(self.running.all()):
            self._preempt(request)
        self.kv.reset_prefix_cache()
        outputs = EngineCoreOutputs.ended([r.core.index for r in failed], FinishReason.ERROR, error)
        outputs.stats = self.stats()
        return outputs

    def _discard_stale(self, frame: Frame, live: np.ndarray) -> None:
        for request in frame.requests[~live]:
            request.frames_to_discard -= 1
            if request.frames_to_discard == 0 and request.state == RequestState.WAITING:
                self._draining.discard(request)
                self.unblock(request.request_id)

    def _end(self, request: Request, failed: bool = False) -> None:
        if request.state == RequestState.FINISHED:
            return
        still_loading = request.state == RequestState.WAITING_REMOTE_KV
        if request.state == RequestState.RUNNING:
            self._leave_row(request)
        self.waiting.remove(request)
        self.blocked.pop(request.request_id, None)
        self._draining.discard(request)
        self._started.discard(request)
        request.state = RequestState.FINISHED
        request.prompt_planned = False
        del self.requests[request.request_id]
        for sibling in self._siblings.pop(request.request_id, ()):
            self._leave_fork(sibling)
        keep = self.connector is not None and not failed
        if keep and self.connector is not None:
            keep = self.connector.request_finished(request, request.block_ids()) or still_loading
        if keep:
            self.sending[request.request_id] = request
        else:
            self.kv.free(request)

    def _leave_row(self, request: Request) -> None:
        self._released_rows.append(request.row)
        request.num_computed = int(min(self.running.num_computed[request.row], self.running.num_tokens[request.row]))
        self.running.remove(request)
        self._common_prefix = None

    def _awaits_connector(self) -> bool:
        """Whether steps must go on, even empty ones, to hear of blocks being moved."""
        if self.connector is None:
            return False
        remote = any(r.state == RequestState.WAITING_REMOTE_KV for r in self.blocked.values())
        return bool(self.sending) or remote

    def _take_connector_news(self, output: ModelRunnerOutput) -> None:
        for request_id in output.finished_recving:
            self.unblock(request_id)
        for request_id in (*output.finished_sending, *output.finished_recving):
            request = self.sending.pop(request_id, None)
            if request is not None:
                self.kv.free(request)
