"""Turns the core's outputs (columns) into each request's outputs: text, logprobs, metrics."""

import functools
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from quire.config import EngineConfig
from quire.engine.completion import Completion
from quire.engine.logprobs import FlatLogprobs, Logprob
from quire.engine.logprobs import PromptLogprobs as UserPromptLogprobs
from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.messages.lora import LoRARequest
from quire.messages.requests import (
    EngineCoreOutputs,
    EngineCoreRequest,
    ErrorKind,
    FinishReason,
    PromptLogprobs,
    RequestError,
    failure_of,
    sequence_id,
)
from quire.messages.sampling_params import ALL_LOGPROBS, RequestOutputKind, SamplingParams
from quire.metrics.engine import EngineMetrics
from quire.metrics.request import RequestMetrics
from quire.metrics.spec_decode import SpecDecodeMetrics
from quire.pooling.outputs import PoolingOutput, PoolingRequestOutput
from quire.tokenizer.detokenizer import IncrementalDetokenizer
from quire.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger("quire")

EngineOutput = RequestOutput | PoolingRequestOutput[PoolingOutput]
Entry = dict[int, Logprob]  # the token itself first, then the most likely


@dataclass(slots=True)
class UserRequest:
    """A user's request: one or more completions of one prompt. One that pools has a completion without tokens."""

    request_id: str
    core_id: str
    index: int  # of the first completion; the others follow
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    metrics: RequestMetrics
    clock: float  # wall clock minus monotonic clock, at arrival
    num_running: int
    resumed_token_ids: list[int]  # generated elsewhere
    completions: list[Completion | None]  # None: no output yet
    num_cached: int | None = None
    prompt_logprobs: UserPromptLogprobs | None = None
    prompt_scores: np.ndarray | None = None  # [positions, k] of prompt_logprob_token_ids
    error: RequestError | None = None
    pools: bool = False
    pooled: np.ndarray | None = None
    lora: LoRARequest | None = None

    @property
    def indices(self) -> range:
        return range(self.index, self.index + len(self.completions))

    @property
    def num_tokens(self) -> list[int]:
        """Tokens generated here, per completion."""
        return [0 if completion is None else completion.num_generated for completion in self.completions]


class OutputProcessor:
    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stream_interval: int = 1,
        buckets: Mapping[str, Sequence[float]] | None = None,
        new_draft_metrics: Callable[[], SpecDecodeMetrics] | None = None,
    ) -> None:
        """Streams get an output every `stream_interval` tokens, beside the first and the last. `buckets`: of
        EngineMetrics. `new_draft_metrics`: for a completion, if its drafts are counted."""
        self.tokenizer = tokenizer
        self.stream_interval = stream_interval
        self.metrics = EngineMetrics(buckets)
        self._new_draft_metrics = new_draft_metrics
        self._running: dict[int, UserRequest] = {}  # by the core's index
        self._requests: dict[str, UserRequest] = {}

    @classmethod
    def of_engine(cls, config: EngineConfig, tokenizer: Tokenizer | None) -> "OutputProcessor":
        observed, num_drafts = config.observability, config.speculative.num_drafts
        level, counts = observed.per_request_spec_decode_metrics, None
        if num_drafts and level != "none":
            counts = functools.partial(SpecDecodeMetrics, num_drafts, level == "detailed")
        return cls(tokenizer, config.scheduler.stream_interval, observed.custom_histogram_buckets, counts)

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_sequences(self) -> int:
        """Running completions of all requests."""
        return len(self._running)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, request_id: str, prompt: str | None, prompt_token_ids: list[int], request: EngineCoreRequest) -> None:
        """`request` is the core's. Completions are created at their first token."""
        if request_id in self._requests:
            raise ValueError(f"request id {request_id!r} is in use; ids must be unique among unfinished requests")
        params = request.sampling
        user = UserRequest(
            request_id,
            request.request_id,
            request.index,
            prompt,
            prompt_token_ids,
            params,
            RequestMetrics(request.arrival_time),
            time.time() - time.monotonic(),
            num_running=params.n,
            resumed_token_ids=[] if request.output_token_ids is None else request.output_token_ids.tolist(),
            completions=[None] * params.n,
            pools=request.pooling is not None,
            lora=request.lora,
        )
        if params.prompt_logprobs is not None:
            user.prompt_logprobs = FlatLogprobs() if params.flat_logprobs else []
            user.prompt_logprobs.append(None)  # of the first token
        if params.prompt_logprob_token_ids is not None:
            rows = params.prompt_logprob_token_ids
            user.prompt_scores = np.full((len(rows), max(map(len, rows))), -np.inf, np.float32)
        self._running.update(dict.fromkeys(user.indices, user))
        self._requests[request_id] = user

    def drop(self, request_ids: list[str]) -> list[str]:
        """Remove requests; returns the core's ids of their completions that are still running there."""
        removed = [core_id for i in request_ids if i in self._requests for core_id in self._remove(self._requests[i])]
        for _ in removed:
            self.metrics.finished(str(FinishReason.ABORT))
        return removed

    def _remove(self, request: UserRequest) -> list[str]:
        del self._requests[request.request_id]
        running = [i for i in request.indices if self._running.pop(i, None) is not None]
        return [sequence_id(request.core_id, i - request.index) for i in running]

    def aborted(self, request_id: str) -> EngineOutput:
        """The last output of a request that is about to be dropped."""
        request = self._requests[request_id]
        completions = self._all_completions(request)
        for completion in completions:
            completion.finish(str(FinishReason.ABORT), None)
        request.num_running = 0
        self._record_end(request, time.monotonic())
        return self._final_output(request)

    def process(
        self, outputs: EngineCoreOutputs, prompt_entries: list[list[Entry] | None] | None = None
    ) -> tuple[list[EngineOutput], list[str]]:
        """Process one step. Returns outputs for the requests whose output_kind wants one now, and the core's ids of
        completions that finish here: at a stop string, at repetition, or because detokenization failed."""
        now = time.monotonic()
        tokens, offsets, finish = outputs.token_ids.tolist(), outputs.offsets.tolist(), outputs.finish.tolist()
        logprobs_at = {} if outputs.logprobs is None else {int(p): i for i, p in enumerate(outputs.logprobs.position)}
        counted = outputs.num_drafts if self._new_draft_metrics is not None else None
        drafted = counted.tolist() if counted is not None else None
        self.metrics.generated(len(tokens))
        for index in outputs.preempted:
            if index in self._running:
                self._running[index].metrics.num_preemptions += 1
        ready: list[EngineOutput] = []
        ended: list[str] = []
        for i, part in enumerate(outputs.prompt_logprobs):
            self._add_prompt_logprobs(part, prompt_entries[i] if prompt_entries else None, ready, ended)
        token_before: defaultdict[float, int] = defaultdict(int)
        for i, index in enumerate(outputs.index.tolist()):
            request = self._running.get(index)
            if request is None:
                continue  # it finished here while the core kept running it
            # A detokenization error must fail only its own request.
            try:
                completion = request.completions[index - request.index] or self._completion(request, index)
                if offsets[i] < offsets[i + 1]:
                    if completion.last_token_at:
                        token_before[completion.last_token_at] += 1
                    elif request.metrics.first_token_time is None:
                        self._record_first_token(request, int(outputs.num_cached[i]), outputs.scheduled.get(i), now)
                    completion.last_token_at = now
                completion.add_tokens(tokens[offsets[i] : offsets[i + 1]])
                if drafted is not None and drafted[i] and completion.drafts is not None:
                    completion.drafts.add(drafted[i], offsets[i + 1] - offsets[i])
                if logprobs_at and outputs.logprobs is not None:
                    found = outputs.logprobs
                    for at in (logprobs_at[j] for j in range(offsets[i], offsets[i + 1]) if j in logprobs_at):
                        self._add_logprobs(completion, found.token_ids[at], found.logprobs[at], int(found.ranks[at]))
                if finish[i]:
                    completion.finish(str(FinishReason(finish[i])), outputs.stop_reasons.get(i))
                    request.error = outputs.errors.get(i, request.error)
                    if i in outputs.pooled:
                        self._record_pooled(request, outputs, i)
                elif completion.finish_reason is not None:
                    ended.append(completion.core_id)
                if completion.finish_reason is not None:
                    self._end(index, request, completion, now)
                if request.params.output_kind != RequestOutputKind.FINAL_ONLY:
                    interval = request.params.stream_interval or self.stream_interval
                    if interval <= 1 or completion.is_due(interval):
                        ready.append(_output(request, [completion.output()]))
                elif request.num_running == 0:
                    ready.append(self._final_output(request))
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # also panics of Rust libraries
                self._fail(request, error, ready, ended)
        self.metrics.between_tokens(now, token_before)
        return ready, ended

    def _fail(self, request: UserRequest, error: BaseException, ready: list[EngineOutput], ended: list[str]) -> None:
        """A request's outputs could not be processed: finish it, alone, with an error output."""
        logger.error("request %s failed in the front end", request.request_id, exc_info=error)
        if request.request_id in self._requests:
            removed = self._remove(request)
            ended += removed
            for _ in removed:
                self.metrics.finished(str(FinishReason.ERROR))
        request.num_running = 0
        request.error = failure_of(error)
        reason = str(FinishReason.ERROR)
        if request.pools:
            ready.append(_pooling_output(request, reason))
            return
        wrong = [CompletionOutput(i, "", [], finish_reason=reason) for i in range(len(request.completions))]
        ready.append(_output(request, wrong))

    def _completion(self, request: UserRequest, index: int) -> Completion:
        number = index - request.index
        detokenizer = self._detokenizer(request.prompt_token_ids, request.params)
        completion = Completion(sequence_id(request.core_id, number), number, request.params, detokenizer)
        if self._new_draft_metrics is not None:
            completion.drafts = self._new_draft_metrics()
        if request.resumed_token_ids:
            completion.resume(request.resumed_token_ids)
        request.completions[number] = completion
        return completion

    def _all_completions(self, request: UserRequest) -> list[Completion]:
        return [
            completion or self._completion(request, index)
            for index, completion in zip(request.indices, request.completions, strict=True)
        ]

    def _final_output(self, request: UserRequest) -> EngineOutput:
        """With all completions."""
        completions = self._all_completions(request)
        if request.pools:
            return _pooling_output(request, completions[0].finish_reason)
        return _output(request, [completion.output() for completion in completions])

    def _record_pooled(self, request: UserRequest, outputs: EngineCoreOutputs, row: int) -> None:
        request.pooled = outputs.pooled[row]
        request.num_cached = int(outputs.num_cached[row])
        scheduled = outputs.scheduled.get(row)
        if scheduled is not None:
            request.metrics.first_scheduled_time = scheduled + request.clock
        self.metrics.pooled(len(request.prompt_token_ids), request.num_cached)

    def _record_first_token(self, request: UserRequest, num_cached: int, scheduled: float | None, now: float) -> None:
        """Record the request's first token."""
        times = request.metrics
        times.first_token_time = now + request.clock
        if scheduled is not None:
            times.first_scheduled_time = scheduled + request.clock
        request.num_cached = num_cached
        seconds = max(0.0, times.first_token_time - times.arrival_time)
        self.metrics.first_token(seconds, len(request.prompt_token_ids), num_cached)

    @staticmethod
    def _record_end(request: UserRequest, now: float) -> None:
        times = request.metrics
        times.finished_time = now + request.clock
        times.num_generation_tokens = sum(request.num_tokens)
        if times.first_token_time is not None:
            times.last_token_time = max(c.last_token_at for c in request.completions if c is not None) + request.clock

    def _end(self, index: int, request: UserRequest, completion: Completion, now: float) -> None:
        del self._running[index]
        request.num_running -= 1
        self.metrics.finished(completion.finish_reason or "")
        if request.num_running == 0:
            self._record_end(request, now)
            num_prompt, num_cached = len(request.prompt_token_ids), request.num_cached or 0
            params = None if request.pools else request.params
            if request.error is not None and request.error.kind is ErrorKind.NOT_A_NUMBER:
                self.metrics.corrupted_requests += 1
            self.metrics.ended(request.metrics, params, num_prompt, num_cached, request.num_tokens)
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
        if completion.logprobs is None or completion.cumulative_logprob is None:
            raise ValueError("the engine sent logprobs for a request without them")
        if len(completion.logprobs) < completion.num_generated:
            params = completion.params
            entry = self._entry(ids, values, rank, params.num_logprobs, ranked=not params.logprob_token_ids)
            completion.logprobs.append(entry)
            completion.cumulative_logprob += float(values[0])

    def prompt_entries(self, outputs: EngineCoreOutputs) -> list[list[Entry] | None]:
        """The entries that `process` needs for prompt logprobs, precomputed in any thread: slow for long prompts."""
        found: list[list[Entry] | None] = []
        for part in outputs.prompt_logprobs:
            request = self._running.get(part.owner)
            try:
                entries = request is not None and not part.candidates
                found.append(self._prompt_entries(request, part) if request is not None and entries else None)
            except Exception:
                found.append(None)  # `process` fails in the same way and handles it
        return found

    def _prompt_entries(self, request: UserRequest, part: PromptLogprobs) -> list[Entry]:
        num_top = request.params.prompt_logprobs
        return [
            self._entry(part.token_ids[i], part.logprobs[i], int(part.ranks[i]), num_top)
            for i in range(len(part.ranks))
        ]

    def _add_prompt_logprobs(
        self, part: PromptLogprobs, entries: list[Entry] | None, ready: list[EngineOutput], ended: list[str]
    ) -> None:
        request = self._running.get(part.owner)
        if request is None:
            return
        try:
            if part.candidates:
                self._set_prompt_scores(request, part)
            else:
                self._extend_prompt_logprobs(request, part, entries)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            self._fail(request, error, ready, ended)

    def _extend_prompt_logprobs(self, request: UserRequest, part: PromptLogprobs, entries: list[Entry] | None) -> None:
        logprobs = request.prompt_logprobs
        if logprobs is None:
            raise ValueError("the engine sent prompt logprobs for a request without them")
        # After a preemption the prompt is recomputed: do not append known entries twice.
        logprobs += (entries or self._prompt_entries(request, part))[len(logprobs) - part.start :]

    @staticmethod
    def _set_prompt_scores(request: UserRequest, part: PromptLogprobs) -> None:
        if request.prompt_scores is None:
            raise ValueError("the engine sent scores of a prompt for a request without them")
        first = part.start - 1 - (request.params.prompt_logprob_start or 0)
        request.prompt_scores[first : first + len(part.logprobs)] = part.logprobs

    def _entry(self, ids: np.ndarray, values: np.ndarray, rank: int, num_top: int | None, ranked: bool = True) -> Entry:
        """The token itself first, then the most likely, which may include it, or the ones that the request named."""
        stop = None if num_top in (None, ALL_LOGPROBS) else 1 + (num_top or 0)
        entry: Entry = {}
        for number, (token, value) in enumerate(zip(ids[:stop].tolist(), values[:stop].tolist(), strict=True)):
            if token not in entry:
                entry[token] = Logprob(value, (number if ranked else None) if number else rank, self._token_text(token))
        return entry

    def _token_text(self, token: int) -> str | None:
        return self.tokenizer.token_text(token) if self.tokenizer is not None else None


def _output(request: UserRequest, outputs: list[CompletionOutput]) -> RequestOutput:
    # By position: made for every token that is streamed, and twice as fast as by name.
    output = RequestOutput(
        request.request_id,
        request.prompt,
        request.prompt_token_ids,
        request.prompt_logprobs,
        outputs,
        request.num_running == 0,
        request.metrics,
        request.lora,
        None,
        None,
        request.num_cached,
        None,
        request.prompt_scores,
    )
    if request.error is not None:
        output.error, output.error_kind = request.error.message, request.error.kind
    return output


def _pooling_output(request: UserRequest, finish_reason: str | None) -> PoolingRequestOutput[PoolingOutput]:
    error, data = request.error, request.pooled
    return PoolingRequestOutput(
        request_id=request.request_id,
        outputs=PoolingOutput(data if data is not None else np.empty(0, np.float32)),
        prompt_token_ids=request.prompt_token_ids,
        finished=True,
        num_cached_tokens=request.num_cached,
        finish_reason=finish_reason,
        metrics=request.metrics,
        error=None if error is None else error.message,
        error_kind=None if error is None else error.kind,
    )
