"""The core's columns back to each user's request: text, logprobs, metrics."""

import time
from dataclasses import dataclass, field

import numpy as np

from quire.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from quire.messages.requests import EngineCoreOutputs, FinishReason, Logprobs
from quire.messages.sampling_params import RequestOutputKind, SamplingParams
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
    num_running: int
    num_cached: int | None = None
    error: str | None = None
    completions: list["Completion"] = field(default_factory=list)


@dataclass(slots=True)
class Completion:
    request: UserRequest
    core_id: str
    index: int
    detokenizer: IncrementalDetokenizer | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_sent: int = 0  # tokens in outputs so far
    num_decoded: int = 0
    text_sent: int = 0


class OutputProcessor:
    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._completions: dict[int, Completion] = {}
        self._requests: dict[str, UserRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(
        self,
        request_id: str,
        core_requests: list[tuple[int, str]],  # (index, id) of each completion
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        arrival_time: float,
    ) -> None:
        request = UserRequest(
            request_id, prompt, prompt_token_ids, params, RequestMetrics(arrival_time), num_running=len(core_requests)
        )
        self._requests[request_id] = request
        for i, (index, core_id) in enumerate(core_requests):
            completion = Completion(request, core_id, i, self._detokenizer(prompt_token_ids, params))
            if params.logprobs is not None:
                completion.logprobs, completion.cumulative_logprob = [], 0.0
            request.completions.append(completion)
            self._completions[index] = completion

    def drop(self, request_ids: list[str]) -> list[str]:
        """Forget requests; returns the core's ids of their unfinished completions."""
        dropped = [self._requests.pop(i) for i in request_ids if i in self._requests]
        gone = {c.core_id for request in dropped for c in request.completions if c.finish_reason is None}
        self._completions = {i: c for i, c in self._completions.items() if c.request.request_id in self._requests}
        return sorted(gone)

    def process(self, outputs: EngineCoreOutputs) -> list[RequestOutput]:
        """Take in one step; an output for each request that has news its user wants now."""
        now = time.time()
        tokens, offsets = outputs.token_ids.tolist(), outputs.offsets.tolist()
        finish = outputs.finish.tolist()
        logprobs = _by_row(outputs.logprobs)
        ready = []
        for i, index in enumerate(outputs.index.tolist()):
            completion = self._completions.get(index)
            if completion is None:
                continue  # dropped while the step ran
            request = completion.request
            if request.metrics.first_token_time is None:
                request.metrics.first_token_time = now
                request.num_cached = int(outputs.num_cached[i])
            completion.token_ids += tokens[offsets[i] : offsets[i + 1]]
            if i in logprobs and outputs.logprobs is not None:
                self._add_logprobs(completion, outputs.logprobs, logprobs[i])
            if finish[i]:
                completion.finish_reason = str(FinishReason(finish[i]))
                completion.stop_reason = outputs.stop_reasons.get(i)
                request.error = outputs.errors.get(i, request.error)
                request.num_running -= 1
                del self._completions[index]
                if request.num_running == 0:
                    request.metrics.finished_time = now
                    del self._requests[request.request_id]
            output = self._output(request, completion)
            if output is not None:
                ready.append(output)
        return ready

    def _output(self, request: UserRequest, completion: Completion) -> RequestOutput | None:
        if request.params.output_kind == RequestOutputKind.FINAL_ONLY:
            if request.num_running:
                return None
            parts = [self._completion_output(c) for c in request.completions]
        else:
            parts = [self._completion_output(completion)]
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=parts,
            finished=request.num_running == 0,
            num_cached_tokens=request.num_cached,
            metrics=request.metrics,
            error=request.error,
        )

    def _completion_output(self, completion: Completion) -> CompletionOutput:
        # Decoded when someone looks: a final-only request is decoded in one go.
        text = self._decode(completion)
        start, text_start = 0, 0
        if completion.request.params.output_kind == RequestOutputKind.DELTA:
            start, text_start = completion.num_sent, completion.text_sent
        completion.num_sent, completion.text_sent = len(completion.token_ids), len(text)
        return CompletionOutput(
            index=completion.index,
            text=text[text_start:],
            token_ids=completion.token_ids[start:],
            cumulative_logprob=completion.cumulative_logprob,
            logprobs=completion.logprobs[start:] if completion.logprobs is not None else None,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )

    def _decode(self, completion: Completion) -> str:
        detokenizer = completion.detokenizer
        if detokenizer is None:
            return ""
        detokenizer.add(completion.token_ids[completion.num_decoded :])
        completion.num_decoded = len(completion.token_ids)
        if completion.finish_reason is not None:
            detokenizer.flush()
        return detokenizer.text

    def _detokenizer(self, prompt_token_ids: list[int], params: SamplingParams) -> IncrementalDetokenizer | None:
        if self.tokenizer is None or not params.detokenize:
            return None
        return IncrementalDetokenizer(self.tokenizer, prompt_token_ids, params.skip_special_tokens)

    def _add_logprobs(self, completion: Completion, logprobs: Logprobs, at: int) -> None:
        asked = completion.request.params.logprobs
        assert asked is not None and completion.logprobs is not None and completion.cumulative_logprob is not None
        values = logprobs.logprobs[at, : 1 + asked].tolist()
        ids = logprobs.token_ids[at, : 1 + asked].tolist()
        entry: dict[int, Logprob] = {}
        for place, (token, value) in enumerate(zip(ids, values, strict=True)):
            if token not in entry:  # the sampled token comes first and may be among the top ones
                rank = place if place else int(logprobs.ranks[at])
                entry[token] = Logprob(value, rank, self._token_text(token))
        completion.logprobs.append(entry)
        completion.cumulative_logprob += values[0]

    def _token_text(self, token: int) -> str | None:
        return self.tokenizer.token_text(token) if self.tokenizer is not None else None


def _by_row(logprobs: Logprobs | None) -> dict[int, int]:
    return {} if logprobs is None else {int(row): at for at, row in enumerate(np.asarray(logprobs.position))}
