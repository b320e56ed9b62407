"""The core's columns back to each user's request: text, logprobs, metrics."""

import time
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from quire.engine.completion import Completion
from quire.engine.metrics import EngineMetrics
from quire.engine.outputs import Logprob, RequestMetrics, RequestOutput
from quire.messages.requests import EngineCoreOutputs, EngineCoreRequest, FinishReason, PromptLogprobs
from quire.messages.sampling_params import ALL_LOGPROBS, RequestOutputKind, SamplingParams
from quire.tokenizer.detokenizer import IncrementalDetokenizer
from quire.tokenizer.tokenizer import Tokenizer


@dataclass(slots=True)
class UserRequest:
    """What the user asked for: one or more completions of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    metrics: RequestMetrics
    clock: float  # the wall clock minus the monotonic one, when the request came
    num_running: int
    num_cached: int | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = None
    completions: list[Completion] = field(default_factory=list)


class OutputProcessor:
    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.metrics = EngineMetrics()
        self._running: dict[int, tuple[UserRequest, Completion]] = {}  # by the index the core knows
        self._requests: dict[str, UserRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_sequences(self) -> int:
        """Completions that run, of all requests."""
        return len(self._running)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(
        self, request_id: str, prompt: str | None, prompt_token_ids: list[int], requests: list[EngineCoreRequest]
    ) -> None:
        """`requests` are the core's, one for each completion."""
        if request_id in self._requests:
            raise ValueError(f"request id {request_id!r} is in use; ids must be unique among unfinished requests")
        params = requests[0].params
        user = UserRequest(
            request_id,
            prompt,
            prompt_token_ids,
            params,
            RequestMetrics(requests[0].arrival_time),
            time.time() - time.monotonic(),
            num_running=len(requests),
            prompt_logprobs=[None] if params.prompt_logprobs is not None else None,
        )
        self._requests[request_id] = user
        for i, request in enumerate(requests):
            completion = Completion(request.request_id, i, params, self._detokenizer(prompt_token_ids, params))
            user.completions.append(completion)
            self._running[request.index] = user, completion

    def drop(self, request_ids: list[str]) -> list[str]:
        """Forget requests; returns the core's ids of their completions that still run there."""
        known = {i for i in request_ids if self._requests.pop(i, None) is not None}
        if not known:
            return []
        gone = {i: completion.core_id for i, (user, completion) in self._running.items() if user.request_id in known}
        for index in gone:
            del self._running[index]
            self.metrics.finished(str(FinishReason.ABORT))
        return list(gone.values())

    def aborted(self, request_id: str) -> RequestOutput:
        """The last output of a request that is about to be dropped."""
        request = self._requests[request_id]
        for completion in request.completions:
            completion.finish(str(FinishReason.ABORT), None)
        request.num_running = 0
        self._note_end(request, time.monotonic())
        return _output(request, request.completions)

    def process(self, outputs: EngineCoreOutputs) -> tuple[list[RequestOutput], list[str]]:
        """Take in one step. An output for each request that has news its user wants now, and the core's ids of those
        that end here, at a stop string or in a circle."""
        now = time.monotonic()
        for part in outputs.prompt_logprobs:
            self._add_prompt_logprobs(part)
        tokens, offsets, finish = outputs.token_ids.tolist(), outputs.offsets.tolist(), outputs.finish.tolist()
        logprobs_at = {} if outputs.logprobs is None else {int(p): i for i, p in enumerate(outputs.logprobs.position)}
        self.metrics.generated(len(tokens))
        ready: list[RequestOutput] = []
        ended: list[str] = []
        token_before: defaultdict[float, int] = defaultdict(int)
        for i, index in enumerate(outputs.index.tolist()):
            if index not in self._running:
                continue  # it ended here while the core went on
            request, completion = self._running[index]
            if offsets[i] < offsets[i + 1]:
                if completion.last_token_at:
                    token_before[completion.last_token_at] += 1
                elif request.metrics.first_token_time is None:
                    self._begin(request, int(outputs.num_cached[i]), outputs.scheduled.get(i), now)
                completion.last_token_at = now
            completion.add_tokens(tokens[offsets[i] : offsets[i + 1]])
            if i in logprobs_at and outputs.logprobs is not None:
                at = logprobs_at[i]
                found = outputs.logprobs
                self._add_logprobs(completion, found.token_ids[at], found.logprobs[at], int(found.ranks[at]))
            if finish[i]:
                completion.finish(str(FinishReason(finish[i])), outputs.stop_reasons.get(i))
                request.error = outputs.errors.get(i, request.error)
            elif completion.finish_reason is not None:
                ended.append(completion.core_id)
            if completion.finish_reason is not None:
                self._end(index, request, completion, now)
            if request.params.output_kind != RequestOutputKind.FINAL_ONLY:
                ready.append(_output(request, [completion]))
            elif request.num_running == 0:
                ready.append(_output(request, request.completions))
        self.metrics.between_tokens(now, token_before)
        return ready, ended

    def _begin(self, request: UserRequest, num_cached: int, scheduled: float | None, now: float) -> None:
        """Its first token is here."""
        times = request.metrics
        times.first_token_time = now + request.clock
        if scheduled is not None:
            times.first_scheduled_time = scheduled + request.clock
        request.num_cached = num_cached
        seconds = max(0.0, times.first_token_time - times.arrival_time)
        self.metrics.first_token(seconds, len(request.prompt_token_ids), num_cached)

    @staticmethod
    def _note_end(request: UserRequest, now: float) -> None:
        times = request.metrics
        times.finished_time = now + request.clock
        times.num_generation_tokens = sum(len(completion.token_ids) for completion in request.completions)
        if times.first_token_time is not None:
            times.last_token_time = max(c.last_token_at for c in request.completions) + request.clock

    def _end(self, index: int, request: UserRequest, completion: Completion, now: float) -> None:
        del self._running[index]
        request.num_running -= 1
        self.metrics.finished(completion.finish_reason or "")
        if request.num_running == 0:
            self._note_end(request, now)
            num_tokens = [len(completion.token_ids) for completion in request.completions]
            num_prompt, num_cached = len(request.prompt_token_ids), request.num_cached or 0
            self.metrics.ended(request.metrics, request.params, num_prompt, num_cached, num_tokens)
            del self._requests[request.request_id]

    def _detokenizer(self, prompt_token_ids: list[int], params: SamplingParams) -> IncrementalDetokenizer | None:
        if self.tokenizer is None or not params.detokenize:
            return None
        return IncrementalDetokenizer(
            self.tokenizer,
            prompt_token_ids,
            params.skip_special_tokens,
            params.spaces_between_special_tokens,
            frozenset(params.visible_token_ids),
        )

    def _add_logprobs(self, completion: Completion, ids: np.ndarray, values: np.ndarray, rank: int) -> None:
        assert completion.logprobs is not None and completion.cumulative_logprob is not None
        if len(completion.logprobs) < len(completion.token_ids):
            completion.logprobs.append(self._entry(ids, values, rank, completion.params.logprobs))
            completion.cumulative_logprob += float(values[0])

    def _add_prompt_logprobs(self, part: PromptLogprobs) -> None:
        if part.owner not in self._running:
            return
        request, _ = self._running[part.owner]
        scores = request.prompt_logprobs
        assert scores is not None
        # After a preemption the prompt is computed again: what is known already is not taken twice.
        for i in range(len(scores) - part.start, len(part.ranks)):
            asked = request.params.prompt_logprobs
            scores.append(self._entry(part.token_ids[i], part.logprobs[i], int(part.ranks[i]), asked))

    def _entry(self, ids: np.ndarray, values: np.ndarray, rank: int, asked: int | None) -> dict[int, Logprob]:
        """The token itself first, then the likeliest; it may be among those."""
        stop = None if asked in (None, ALL_LOGPROBS) else 1 + (asked or 0)
        entry: dict[int, Logprob] = {}
        for place, (token, value) in enumerate(zip(ids[:stop].tolist(), values[:stop].tolist(), strict=True)):
            if token not in entry:
                entry[token] = Logprob(value, place or rank, self._token_text(token))
        return entry

    def _token_text(self, token: int) -> str | None:
        return self.tokenizer.token_text(token) if self.tokenizer is not None else None


def _output(request: UserRequest, completions: list[Completion]) -> RequestOutput:
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        outputs=[completion.output() for completion in completions],
        finished=request.num_running == 0,
        num_cached_tokens=request.num_cached,
        prompt_logprobs=request.prompt_logprobs,
        metrics=request.metrics,
        error=request.error,
    )
