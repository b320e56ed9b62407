"""Plans in flight, and what their results do: append tokens, find the requests that ended, make the core's outputs."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from quire.core.request import Request
from quire.core.running_set import RunningSet
from quire.messages.plan import ModelRunnerOutput, SchedulerOutput
from quire.messages.requests import EngineCoreOutputs, ErrorKind, FinishReason, Logprobs, RequestError

NO_TOKEN = RequestError(
    ErrorKind.NOT_A_NUMBER,
    "the model's logits hold NaN or allow no token; check the weights, or compute in float32 (--dtype float32)",
)
NOT_FINISHED, STOP, LENGTH = (np.int8(r) for r in (FinishReason.NONE, FinishReason.STOP, FinishReason.LENGTH))


@dataclass(slots=True)
class Frame:
    """A plan in flight: the requests it advances, and for which of them it samples a token."""

    step: int
    rows: np.ndarray
    generations: np.ndarray
    requests: np.ndarray
    samples: np.ndarray


@dataclass(slots=True)
class StepResult:
    """What the scheduler has to do about a plan's results."""

    outputs: EngineCoreOutputs
    stale: Iterable[Request]  # preempted or ended since the plan was made
    finished: list[Request] = field(default_factory=list)  # by a stop token or a limit
    failed: list[Request] = field(default_factory=list)


class ResultReader:
    """Results are read through the frames of their plans, in the order of plans."""

    def __init__(self, running: RunningSet) -> None:
        self.num_prompt_tokens = 0  # of requests that got their first token
        self.num_generated_tokens = 0
        self._running = running
        self._frames: deque[Frame] = deque()

    @property
    def pending(self) -> bool:
        return bool(self._frames)

    def expect(self, step: int, rows: np.ndarray, requests: np.ndarray, samples: np.ndarray) -> None:
        """A plan is made: its results will come."""
        self._frames.append(Frame(step, rows, self._running.generation[rows], requests, samples))

    def constrained_rows(self, plan: SchedulerOutput) -> list[tuple[int, int]] | None:
        """Rows of the newest plan that get a token under a grammar, as (place, index of the request). None while a
        token before that one is still in flight."""
        run, frame = self._running, self._frames[-1]
        assert frame.step == plan.step, "only the newest plan can wait for its masks"
        live = frame.samples & (run.generation[frame.rows] == frame.generations)
        places = np.flatnonzero(live & run.constrained[frame.rows])
        rows = frame.rows[places]
        if (run.num_pending[rows] > 1).any():
            return None
        return list(zip(places.tolist(), run.index[rows].tolist(), strict=True))

    def read(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> StepResult:
        run = self._running
        frame, live, stale = self._pop_frame(plan)
        sampled = np.flatnonzero(live & frame.samples)
        rows = frame.rows[sampled]
        tokens = output.token_ids[sampled, 0]
        lengths = run.append(rows, tokens)
        stopped = (run.stop_ids[:, rows] == tokens).any(axis=0)
        finish = np.where(stopped, STOP, np.where(lengths >= run.token_limit[rows], LENGTH, NOT_FINISHED))
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
        result = StepResult(outputs, stale)
        self.num_generated_tokens += len(rows)
        if run.num_awaiting_first_token:
            self._note_first_tokens(rows, outputs)
        for place in np.flatnonzero(finish).tolist():
            request = run.requests[rows[place]]
            if stopped[place] and (request.core.params.ignore_eos or tokens[place] not in request.core.eos_token_ids):
                outputs.stop_reasons[place] = int(tokens[place])
            result.finished.append(request)
        if len(missing):
            result.failed = list(run.requests[rows[missing]])
            fail_without_token(outputs, missing)
        return result

    def fail(self, plan: SchedulerOutput, error: RequestError) -> StepResult:
        """The plan has no results: its requests end with the cause."""
        frame, live, stale = self._pop_frame(plan)
        failed = list(frame.requests[live])
        outputs = EngineCoreOutputs.ended([request.core.index for request in failed], FinishReason.ERROR, error)
        return StepResult(outputs, stale, failed=failed)

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


def select_logprobs(logprobs: Logprobs | None, sampled: np.ndarray) -> Logprobs | None:
    """Logprobs by output row instead of plan row."""
    if logprobs is None:
        return None
    place = np.searchsorted(sampled, logprobs.position)
    place = np.minimum(place, max(0, len(sampled) - 1))
    kept = sampled[place] == logprobs.position if len(sampled) else np.zeros(len(place), bool)
    return Logprobs(place[kept], logprobs.token_ids[kept], logprobs.logprobs[kept], logprobs.ranks[kept])


def fail_without_token(outputs: EngineCoreOutputs, places: np.ndarray) -> None:
    """No token could be sampled for the rows at `places`: they end with an error."""
    outputs.token_ids = np.delete(outputs.token_ids, places)
    lengths = np.ones(len(outputs.index), np.int32)
    lengths[places] = 0
    np.cumsum(lengths, out=outputs.offsets[1:])
    outputs.finish[places] = FinishReason.ERROR
    outputs.errors |= dict.fromkeys(places.tolist(), NO_TOKEN)
    if outputs.logprobs is not None:
        kept = np.flatnonzero(~np.isin(outputs.logprobs.position, places))
        outputs.logprobs = Logprobs(*(column[kept] for column in msgspec.structs.astuple(outputs.logprobs)))
