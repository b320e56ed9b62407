"""Every request with a grammar: waiting for it, then its place in it, step by step.

A matcher moves by confirmed tokens alone, so it needs nothing when its request is preempted or a result is dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.config import EngineConfig
from quire.messages.plan import GrammarMask
from quire.messages.requests import EngineCoreOutputs, EngineCoreRequest
from quire.structured_output.base import Compiled, GrammarError, Matcher
from quire.structured_output.compiler import GrammarCompiler
from quire.structured_output.reasoning_gate import ReasoningGate
from quire.structured_output.registry import BackendRegistry
from quire.structured_output.vocabulary import Vocabulary


@dataclass(slots=True)
class Constrained:
    request: EngineCoreRequest
    end_ids: list[int]  # tokens that may come where the grammar allows the end
    matcher: Matcher
    num_tokens: int = 0  # generated and confirmed
    gate: ReasoningGate | None = None


@dataclass(slots=True)
class Failure:
    request_id: str
    index: int
    cause: str


class StructuredOutputManager:
    def __init__(
        self, registry: BackendRegistry, vocab_size: int, *, compile_seconds: float = 10.0, cache_bytes: int = 1 << 28
    ) -> None:
        self.registry = registry
        self.compiler = GrammarCompiler(registry.compile, seconds=compile_seconds, cache_bytes=cache_bytes)
        self.failures: list[Failure] = []  # requests that must end; whoever ends them empties the list
        self._num_words = (vocab_size + 31) // 32
        self._waiting: dict[str, EngineCoreRequest] = {}
        self._running: dict[int, Constrained] = {}  # by the request's index
        self._index: dict[str, int] = {}

    @classmethod
    def of_engine(cls, config: EngineConfig) -> "StructuredOutputManager":
        options = config.structured_outputs
        registry = BackendRegistry(lambda: Vocabulary.of_engine(config), options.structured_outputs_backend)
        return cls(
            registry,
            config.model.vocab_size,
            compile_seconds=options.structured_outputs_compile_seconds,
            cache_bytes=options.structured_outputs_cache_bytes,
        )

    @property
    def active(self) -> bool:
        """Whether any request has a grammar to keep to."""
        return bool(self._running)

    @property
    def pending(self) -> bool:
        """Whether any request waits for its grammar."""
        return bool(self._waiting) or self.compiler.pending

    def add(self, request: EngineCoreRequest) -> bool:
        """Whether it can run now. If not, `ready` or `failures` will name it."""
        spec = request.params.structured_outputs
        assert spec is not None
        try:
            compiled = self.compiler.request(spec.key(self.registry.asked(spec)), spec, request.request_id)
        except GrammarError as error:
            raise ValueError(f"{spec.field}: {error}") from None
        if compiled is None:
            self._waiting[request.request_id] = request
            return False
        self._enter(request, compiled)
        return True

    def ready(self) -> list[str]:
        """Requests whose grammar has arrived since the last call."""
        found = []
        for job in self.compiler.collect():
            for request_id in job.waiters:
                request = self._waiting.pop(request_id, None)
                if request is None:
                    continue
                if job.compiled is None:
                    self._fail(request, job.error or "the grammar could not be compiled")
                else:
                    self._enter(request, job.compiled)
                    found.append(request_id)
        return found

    def drop(self, request_ids: Sequence[str]) -> None:
        """They are gone; unknown ids are ignored."""
        for request_id in request_ids:
            if self._waiting.pop(request_id, None) is not None:
                self.compiler.forget(request_id)
            self._running.pop(self._index.pop(request_id, -1), None)

    def advance(self, outputs: EngineCoreOutputs) -> None:
        """Confirmed tokens came; who has ended needs its matcher no more."""
        if not self._running:
            return
        for i, index in enumerate(outputs.index.tolist()):
            constrained = self._running.get(index)
            if constrained is None:
                continue
            if outputs.finish[i]:
                self.drop([constrained.request.request_id])
                continue
            for token in outputs.token_ids[outputs.offsets[i] : outputs.offsets[i + 1]].tolist():
                constrained.num_tokens += 1
                if constrained.gate is not None and constrained.gate.takes(token):
                    continue
                if not self._accept(constrained, token):
                    break

    def fill(self, rows: Sequence[tuple[int, int]]) -> GrammarMask | None:
        """Masks for a step's rows, given as (place in the plan, index of the request)."""
        places: list[int] = []
        masks = np.zeros((len(rows), self._num_words), np.int32)
        for place, index in rows:
            constrained = self._running.get(index)
            if constrained is None:
                continue
            row = masks[len(places)]
            if constrained.gate is not None and constrained.gate.inside:
                row[:] = -1
                for token in constrained.end_ids:  # the answer is still to come
                    _set(row, token, False)
                places.append(place)
                continue
            try:
                constrained.matcher.fill(row)
                if not row.any():
                    raise GrammarError("no token of this vocabulary can go on here")
            except GrammarError as error:
                self._fail(constrained.request, str(error))
                continue
            self._settle_end(constrained, row)
            if constrained.gate is not None and constrained.gate.start is not None:
                _set(row, constrained.gate.start, True)
            places.append(place)
        return GrammarMask(np.asarray(places, np.int64), masks[: len(places)]) if places else None

    def _settle_end(self, constrained: Constrained, row: np.ndarray) -> None:
        """All tokens that end the request are allowed where the first is. While min_tokens are not reached, they are
        not, unless the grammar leaves nothing else."""
        params = constrained.request.params
        if _has(row, constrained.end_ids[0]):
            for token in constrained.end_ids:
                _set(row, token, True)
        if constrained.num_tokens < params.min_tokens:
            longer = row.copy()
            for token in (*constrained.end_ids, *params.stop_token_ids):
                _set(longer, token, False)
            if longer.any():
                row[:] = longer

    def _accept(self, constrained: Constrained, token: int) -> bool:
        try:
            if constrained.matcher.accept(token):
                return True
            cause = f"token {token} does not fit the grammar, though it was sampled under it"
        except GrammarError as error:
            cause = str(error)
        self._fail(constrained.request, cause)
        return False

    def _enter(self, request: EngineCoreRequest, compiled: Compiled) -> None:
        special = self.registry.vocabulary.special_ids
        first = self.registry.vocabulary.end_id
        ends = dict.fromkeys(
            [first, *request.eos_token_ids, *(i for i in request.params.stop_token_ids if i in special)]
        )
        try:
            constrained = Constrained(request, list(ends), compiled.matcher(), gate=self._gate(request))
            self._running[request.index] = constrained
            self._index[request.request_id] = request.index
        except GrammarError as error:
            self._fail(request, str(error))

    def _gate(self, request: EngineCoreRequest) -> ReasoningGate | None:
        reasoning = request.params.reasoning
        return None if reasoning is None else ReasoningGate(reasoning, self.registry.vocabulary.tokenizer.token_bytes)

    def _fail(self, request: EngineCoreRequest, cause: str) -> None:
        self.drop([request.request_id])
        spec = request.params.structured_outputs
        assert spec is not None
        self.failures.append(Failure(request.request_id, request.index, f"{spec.field}: {cause}"))


def _has(row: np.ndarray, token: int) -> bool:
    return bool((int(row[token // 32]) >> (token % 32)) & 1)


def _set(row: np.ndarray, token: int, allowed: bool) -> None:
    words = row.view(np.uint32)
    bit = np.uint32(1 << (token % 32))
    words[token // 32] = words[token // 32] | bit if allowed else words[token // 32] & ~bit
