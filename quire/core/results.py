"""Plans in flight, and what their results do: append tokens, find the requests that ended, make the core's outputs."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from quire.core.request import Request
from quire.core.running_set import RunningSet
from quire.messages.plan import ModelRunnerOutput, SchedulerOutput
from quire.messages.requests import EngineCoreOutputs, ErrorKind, FinishReason, Logprobs, RequestError
from quire.spec_decode.draft_planner import DraftPlanner

NO_TOKEN_ERROR = RequestError(
    ErrorKind.NOT_A_NUMBER,
    "the model's logits hold NaN or allow no token; check the weights, or compute in float32 (--dtype float32)",
)
NOT_FINITE_ERROR = RequestError(
    ErrorKind.NOT_A_NUMBER,
    "the pooled vector holds NaN or infinity; check the weights, or compute in float32 (--dtype float32)",
)
NOT_FINISHED, STOP, LENGTH = (np.int8(r) for r in (FinishReason.NONE, FinishReason.STOP, FinishReason.LENGTH))


@dataclass(slots=True)
class Frame:
    """A plan in flight: the requests it advances, for which of them it samples a token, and which it has pooled."""

    step: int
    rows: np.ndarray
    generations: np.ndarray
    requests: np.ndarray
    samples: np.ndarray
    drafts: np.ndarray | None
    pooled: np.ndarray | None  # None: no row pools


class ConstrainedRows(NamedTuple):
    """Rows of a plan that get a token under a grammar."""

    rows: list[tuple[int, int]]  # (first place in the logits, index of the request)
    drafts: dict[int, list[int]]  # by index: those that the plan verifies


@dataclass(slots=True)
class AppliedStep:
    """What the scheduler has to do about a plan's results."""

    outputs: EngineCoreOutputs
    stale: Iterable[Request]  # preempted or ended since the plan was made
    finished: list[Request] = field(default_factory=list)  # by a stop token or a limit
    failed: list[Request] = field(default_factory=list)


class ResultReader:
    """Results are read through the frames of their plans, in the order of plans."""

    def __init__(self, running: RunningSet, drafts: DraftPlanner) -> None:
        self.num_prompt_tokens = 0  # of requests that got their first token
        self.num_generated_tokens = 0
        self._running = running
        self._drafts = drafts
        self._frames: deque[Frame] = deque()

    @property
    def pending(self) -> bool:
        return bool(self._frames)

    def expect(
        self,
        step: int,
        rows: np.ndarray,
        requests: np.ndarray,
        samples: np.ndarray,
        drafts: np.ndarray | None = None,
    ) -> None:
        """A plan is made: its results will come. `samples`: rows that have all their tokens computed then."""
        run, pooled = self._running, None
        if run.num_pooling:
            pooled = samples & run.pools[rows]
            samples = samples & ~pooled
        self._frames.append(Frame(step, rows, run.generation[rows], requests, samples, drafts, pooled))

    def constrained_rows(self, plan: SchedulerOutput) -> ConstrainedRows | None:
        """Rows of the newest plan that get a token under a grammar. None while a token before that one, or a draft that
        the plan verifies, is still in flight."""
        run, frame = self._running, self._frames[-1]
        assert frame.step == plan.step, "only the newest plan can wait for its masks"
        live = frame.samples & (run.generation[frame.rows] == frame.generations)
        places = np.flatnonzero(live & run.constrained[frame.rows])
        rows = frame.rows[places]
        if (run.num_pending[rows] > 1).any():
            return None
        index = run.index[rows].tolist()
        if frame.drafts is None:
            return ConstrainedRows(list(zip(places.tolist(), index, strict=True)), {})
        counts = frame.drafts[places]
        if ((counts > 0) & (run.num_frames[rows] > 1)).any():
            return None
        first = np.cumsum(1 + frame.drafts) - (1 + frame.drafts)
        drafts = {i: run.drafts[row, :count].tolist() for i, row, count in zip(index, rows, counts, strict=True)}
        return ConstrainedRows(list(zip(first[places].tolist(), index, strict=True)), drafts)

    def read(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> AppliedStep:
        run = self._running
        frame, live, stale = self._pop_frame(plan)
        if output.drafts is not None:
            run.drafts[frame.rows[live]] = output.drafts[live]
        if output.num_found is not None:
            self._drafts.found(frame.rows[live], output.num_found[live])
        sampled = np.flatnonzero(live & frame.samples)
        if frame.pooled is not None and not len(sampled) and not output.prompt_logprobs:
            result = AppliedStep(EngineCoreOutputs.ended([], FinishReason.NONE), stale)
            self._read_pooled(frame.rows, live, frame.pooled, output, result)
            return result
        rows = frame.rows[sampled]
        if frame.drafts is None:
            tokens = last = output.token_ids[sampled, 0]
            lengths = run.append(rows, tokens)
            stopped = (run.stop_ids[:, rows] == tokens).any(axis=0)
            offsets = np.arange(len(rows) + 1, dtype=np.int32)
            places = sampled
        else:
            drafts = frame.drafts[sampled]
            tokens, last, stopped, offsets, places = self._accept(rows, output, sampled, drafts)
            lengths = run.num_tokens[rows]
        finish = np.where(stopped, STOP, np.where(lengths >= run.token_limit[rows], LENGTH, NOT_FINISHED))
        missing = np.flatnonzero(last < 0)
        if len(missing):
            finish[missing] = NOT_FINISHED
        outputs = EngineCoreOutputs(
            index=run.index[rows],
            token_ids=tokens,
            offsets=offsets,
            finish=finish,
            num_cached=run.num_cached[rows],
            logprobs=select_logprobs(output.logprobs, places),
            prompt_logprobs=[
                msgspec.structs.replace(part, owner=int(run.index[frame.rows[part.owner]]))
                for part in output.prompt_logprobs
                if live[part.owner]
            ],
            num_drafts=None if frame.drafts is None else drafts.astype(np.int32),
        )
        result = AppliedStep(outputs, stale)
        self.num_generated_tokens += len(tokens)
        if run.num_awaiting_first_token:
            self._note_first_tokens(rows, outputs)
        for place in np.flatnonzero(finish).tolist():
            request = run.requests[rows[place]]
            if stopped[place] and (request.core.sampling.ignore_eos or last[place] not in request.core.eos_token_ids):
                outputs.stop_reasons[place] = int(last[place])
            result.finished.append(request)
        if len(missing):
            result.failed = list(run.requests[rows[missing]])
            fail_without_token(outputs, missing)
        if frame.pooled is not None:
            self._read_pooled(frame.rows, live, frame.pooled, output, result)
        return result

    def _read_pooled(
        self, rows: np.ndarray, live: np.ndarray, pooled: np.ndarray, output: ModelRunnerOutput, result: AppliedStep
    ) -> None:
        """Requests of the plan that pool end with their vectors, as rows behind those that got tokens."""
        places = np.flatnonzero(live & pooled)
        outputs, rows, first = result.outputs, rows[places], len(result.outputs.index)
        outputs.index = np.concatenate([outputs.index, self._running.index[rows]])
        outputs.offsets = np.concatenate([outputs.offsets, np.full(len(rows), outputs.offsets[-1])])
        outputs.finish = np.concatenate([outputs.finish, np.full(len(rows), STOP)])
        outputs.num_cached = np.concatenate([outputs.num_cached, self._running.num_cached[rows]])
        if outputs.num_drafts is not None:
            outputs.num_drafts = np.pad(outputs.num_drafts, (0, len(rows)))
        for i, (place, row) in enumerate(zip(places.tolist(), rows.tolist(), strict=True), first):
            request, data = self._running.requests[row], output.pooled[place]
            if np.isfinite(data).all():
                outputs.pooled[i] = data
                result.finished.append(request)
            else:
                outputs.finish[i], outputs.errors[i] = FinishReason.ERROR, NOT_FINITE_ERROR
                result.failed.append(request)
            if request.scheduled_at:
                outputs.scheduled[i] = request.scheduled_at
            self.num_prompt_tokens += request.num_prompt_tokens

    def _accept(
        self, rows: np.ndarray, output: ModelRunnerOutput, sampled: np.ndarray, drafts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Confirm the tokens that rows with drafts accepted, up to a stop token. All of them, each row's last, whether
        that is a stop token, each row's offset, and the places of all in the runner's token_ids."""
        run = self._running
        matrix, counts = output.token_ids[sampled], output.num_sampled[sampled].astype(np.int64)
        assert (counts > 0).all(), "a row at its limit was planned"
        self._drafts.observe(rows, drafts, np.minimum(counts - 1, drafts))
        width = matrix.shape[1]
        column = np.arange(width)
        kept = column < counts[:, None]
        found, stopped = run.stop_ids[:, rows, None] == matrix, np.zeros(len(rows), bool)
        if found.any():  # which is rare, and what follows is slow
            stops = found.any(axis=0) & kept
            stopped = stops.any(axis=1)
            counts = np.where(stopped, stops.argmax(axis=1) + 1, counts)
            kept = column < counts[:, None]
        place = np.flatnonzero(kept)
        tokens = matrix.reshape(-1)[place]
        run.append_several(rows, tokens, place % width, counts, drafts)
        offsets = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=offsets[1:])
        places = place + np.repeat((sampled - np.arange(len(sampled))) * width, counts)
        return tokens, tokens[offsets[1:] - 1], stopped, offsets, places

    def fail(self, plan: SchedulerOutput, error: RequestError) -> AppliedStep:
        """The plan has no results: its requests end with the cause."""
        frame, live, stale = self._pop_frame(plan)
        failed = list(frame.requests[live])
        outputs = EngineCoreOutputs.ended([request.core.index for request in failed], FinishReason.ERROR, error)
        return AppliedStep(outputs, stale, failed=failed)

    def _pop_frame(self, plan: SchedulerOutput) -> tuple[Frame, np.ndarray, Iterable[Request]]:
        """The oldest plan's frame, which of its rows still have the request that they had, and the other requests."""
        run = self._running
        frame = self._frames.popleft()
        assert frame.step == plan.step, "results must come in the order of their plans"
        live = run.generation[frame.rows] == frame.generations
        all_live = bool(live.all())
        run.num_frames[frame.rows if all_live else frame.rows[live]] -= 1
        return frame, live, () if all_live else frame.requests[~live]

    def _note_first_tokens(self, rows: np.ndarray, outputs: EngineCoreOutputs) -> None:
        run = self._running
        for place in np.flatnonzero(run.awaits_first_token[rows]).tolist():
            request = run.requests[rows[place]]
            outputs.scheduled[place] = request.scheduled_at
            run.note_first_token(request)
            if request.core.fork_of is None:
                self.num_prompt_tokens += request.num_prompt_tokens


def select_logprobs(logprobs: Logprobs | None, places: np.ndarray) -> Logprobs | None:
    """Those of the tokens at `places` of the runner's token_ids, which are the core's output."""
    if logprobs is None:
        return None
    place = np.searchsorted(places, logprobs.position)
    place = np.minimum(place, max(0, len(places) - 1))
    kept = places[place] == logprobs.position if len(places) else np.zeros(len(place), bool)
    return Logprobs(place[kept], logprobs.token_ids[kept], logprobs.logprobs[kept], logprobs.ranks[kept])


def fail_without_token(outputs: EngineCoreOutputs, places: np.ndarray) -> None:
    """No token could be sampled for the rows at `places`, as the last of theirs: they end with an error."""
    missing = outputs.offsets[places + 1] - 1
    outputs.token_ids = np.delete(outputs.token_ids, missing)
    lengths = np.diff(outputs.offsets)
    lengths[places] -= 1
    np.cumsum(lengths, out=outputs.offsets[1:])
    outputs.finish[places] = FinishReason.ERROR
    outputs.errors |= dict.fromkeys(places.tolist(), NO_TOKEN_ERROR)
    if outputs.logprobs is not None:
        found = outputs.logprobs
        kept = np.flatnonzero(~np.isin(found.position, missing))
        position = found.position[kept] - np.searchsorted(missing, found.position[kept])
        outputs.logprobs = Logprobs(position, found.token_ids[kept], found.logprobs[kept], found.ranks[kept])
