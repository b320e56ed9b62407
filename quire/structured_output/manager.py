"""Requests with a grammar: waiting for its compile, then a matcher each, advanced step by step.

A matcher advances by confirmed tokens alone, so preemption and dropped results need no rollback.
"""

import copy
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from quire.config import EngineConfig
from quire.messages.plan import GrammarMask
from quire.messages.requests import EngineCoreOutputs, EngineCoreRequest, ErrorKind, Failure, RequestError, invalid
from quire.messages.structured import StructuredOutputsParams
from quire.structured_output.backends.base import CompiledGrammar, GrammarBusyError, GrammarError, Matcher
from quire.structured_output.backends.registry import BackendRegistry
from quire.structured_output.bitmask import is_set, set_bit
from quire.structured_output.compiler import GrammarCompiler, Key, library_failure
from quire.structured_output.reasoning_gate import ReasoningGate
from quire.structured_output.vocabulary import Vocabulary

logger = logging.getLogger("quire")


@dataclass(slots=True)
class Constrained:
    request: EngineCoreRequest
    end_ids: list[int]  # tokens that end the output; allowed where the grammar is complete
    matcher: Matcher
    num_tokens: int = 0  # generated and confirmed
    gate: ReasoningGate | None = None


class StructuredOutputManager:
    def __init__(
        self,
        registry: BackendRegistry,
        vocab_size: int,
        *,
        compile_seconds: float = 10.0,
        cache_bytes: int = 1 << 28,
        max_queue: float = math.inf,
        queue_seconds: float = math.inf,
    ) -> None:
        self.registry = registry
        self.compiler = GrammarCompiler(
            registry.compile,
            seconds=compile_seconds,
            cache_bytes=cache_bytes,
            max_queue=max_queue,
            queue_seconds=queue_seconds,
        )
        self.failures: list[Failure] = []  # requests to fail; emptied by the caller that fails them
        self._num_words = (vocab_size + 31) // 32
        self._waiting: dict[str, EngineCoreRequest] = {}
        self._running: dict[int, Constrained] = {}  # by the request's index
        self._index: dict[str, int] = {}
        self._indices: np.ndarray | None = None  # keys of `_running`; None: to be rebuilt
        self._last_key: tuple[StructuredOutputsParams, Key] | None = None

    @classmethod
    def of_engine(cls, config: EngineConfig) -> "StructuredOutputManager":
        options = config.structured_outputs
        registry = BackendRegistry(lambda: Vocabulary.of_engine(config), options.structured_outputs_backend)
        registry.prepare()
        return cls(
            registry,
            config.model.vocab_size,
            compile_seconds=options.structured_outputs_compile_seconds,
            cache_bytes=options.structured_outputs_cache_bytes,
            max_queue=options.structured_outputs_max_queue or math.inf,
            queue_seconds=options.structured_outputs_queue_seconds or math.inf,
        )

    @property
    def active(self) -> bool:
        """Whether any running request is constrained."""
        return bool(self._running)

    @property
    def pending(self) -> bool:
        """Whether any request waits for its grammar."""
        return bool(self._waiting) or self.compiler.pending

    def add(self, request: EngineCoreRequest) -> bool:
        """Whether the request can run now. If not, `ready` or `failures` will report it later."""
        spec = request.sampling.structured_outputs
        if spec is None:
            raise ValueError(f"request {request.request_id!r} has no structured_outputs")
        try:
            compiled = self.compiler.request(self._key(spec), spec, request.request_id)
        except GrammarBusyError as error:
            self._fail(request, RequestError(ErrorKind.BUSY, str(error)))
            return False
        if compiled is None:
            self._waiting[request.request_id] = request
            return False
        self._start(request, compiled)
        return True

    def _key(self, spec: StructuredOutputsParams) -> Key:
        """The cache key, computed once for all sequences of a request: a long list of choices takes time to hash."""
        if self._last_key is None or self._last_key[0] is not spec:
            self._last_key = spec, spec.key(self.registry.backend_name(spec))
        return self._last_key[1]

    def ready(self) -> list[str]:
        """Ids of requests whose grammar was compiled since the last call."""
        found = []
        for job in self.compiler.collect():
            for request_id in job.waiters:
                request = self._waiting.pop(request_id, None)
                if request is None:
                    continue
                if job.compiled is None:
                    self._fail(request, job.error or invalid("the grammar could not be compiled"))
                else:
                    self._start(request, job.compiled)
                    found.append(request_id)
        return found

    def waits_for(self, request_ids: Collection[str]) -> bool:
        """Whether any of these requests waits for its grammar."""
        return any(request_id in self._waiting for request_id in request_ids)

    def drop(self, request_ids: Sequence[str]) -> None:
        """Forget finished or aborted requests; unknown ids are ignored."""
        for request_id in request_ids:
            if self._waiting.pop(request_id, None) is not None:
                self.compiler.cancel(request_id)
            if self._running.pop(self._index.pop(request_id, -1), None) is not None:
                self._indices = None

    def advance(self, outputs: EngineCoreOutputs) -> None:
        """Advance matchers by a step's confirmed tokens; drop those of finished requests."""
        if not self._running:
            return
        if self._indices is None:
            self._indices = np.fromiter(self._running, np.int64, len(self._running))
        for i in np.flatnonzero(np.isin(outputs.index, self._indices)).tolist():
            constrained = self._running[int(outputs.index[i])]
            if outputs.finish[i]:
                self.drop([constrained.request.request_id])
                continue
            self._advance(constrained, outputs.token_ids[outputs.offsets[i] : outputs.offsets[i + 1]].tolist())

    def _advance(self, constrained: Constrained, token_ids: list[int]) -> None:
        for token in token_ids:
            constrained.num_tokens += 1
            if not self._accept(constrained, token):
                break

    def fill(
        self, rows: Sequence[tuple[int, int]], drafts: Mapping[int, Sequence[int]] | None = None
    ) -> GrammarMask | None:
        """Bitmasks for a step's rows, given as (row of the logits, index of the request). A request with k draft tokens
        has 1 + k consecutive rows of logits; row j is for the token after the first j draft tokens."""
        drafts = drafts or {}
        lengths = [1 + len(drafts.get(index, ())) for _, index in rows]
        masks = np.zeros((sum(lengths), self._num_words), np.int32)
        places: list[int] = []
        for (place, index), length in zip(rows, lengths, strict=True):
            constrained = self._running.get(index)
            if constrained is None:
                continue
            try:
                self._fill_draft(constrained, masks[len(places) : len(places) + length], drafts.get(index, ()))
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                self._fail(constrained.request, self._cause(constrained.request, error))
                masks[len(places) : len(places) + length] = 0
            else:
                places += range(place, place + length)
        return GrammarMask(np.asarray(places, np.int64), masks[: len(places)]) if places else None

    def _fill_draft(self, constrained: Constrained, masks: np.ndarray, draft: Sequence[int]) -> None:
        """Rows after a rejected draft token are never used and left unconstrained: a mask must not be empty."""
        gate, accepted = copy.copy(constrained.gate), 0
        for ahead, mask in enumerate(masks):
            try:
                self._fill_row(constrained, gate, ahead, mask)
            except GrammarError:
                if not ahead:
                    raise
                masks[ahead:] = -1  # if these drafts are accepted, the next step raises the error
                break
            if ahead == len(draft):
                break
            token = draft[ahead]
            if gate is not None and gate.consumes(token):
                continue
            if token in constrained.end_ids or not is_set(mask, token) or not constrained.matcher.accept(token):
                masks[ahead + 1 :] = -1
                break
            accepted += 1
        constrained.matcher.rollback(accepted)

    def _fill_row(self, constrained: Constrained, gate: ReasoningGate | None, ahead: int, row: np.ndarray) -> None:
        if gate is not None and gate.inside:
            params, row[:] = constrained.request.sampling, -1
            early = constrained.num_tokens + ahead < params.min_tokens
            # The model must not end the output within the reasoning; what users stop at may, but for min_tokens.
            for token in (*constrained.end_ids, *(params.stop_token_ids if early else ())):
                set_bit(row, token, False)
            return
        constrained.matcher.fill(row)
        if not np.count_nonzero(row):
            raise GrammarError("no token of this vocabulary can continue the output here")
        self._set_end_tokens(constrained, constrained.num_tokens + ahead, row)
        if gate is not None and gate.start is not None:
            set_bit(row, gate.start, True)

    def _set_end_tokens(self, constrained: Constrained, num_tokens: int, row: np.ndarray) -> None:
        """Allow all end tokens where the grammar's own is allowed; before min_tokens none, unless the grammar allows
        nothing else."""
        params = constrained.request.sampling
        if is_set(row, constrained.end_ids[0]):
            for token in constrained.end_ids:
                set_bit(row, token, True)
        if num_tokens < params.min_tokens:
            longer = row.copy()
            for token in (*constrained.end_ids, *params.stop_token_ids):
                set_bit(longer, token, False)
            if longer.any():
                row[:] = longer

    def _accept(self, constrained: Constrained, token: int) -> bool:
        try:
            if constrained.gate is not None and constrained.gate.consumes(token):
                return True
            if constrained.matcher.accept(token):
                return True
            error = invalid(f"token {token} does not fit the grammar, though it was sampled under it")
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as raised:
            error = self._cause(constrained.request, raised)
        self._fail(constrained.request, error)
        return False

    def _start(self, request: EngineCoreRequest, compiled: CompiledGrammar) -> None:
        try:
            special = self.registry.vocabulary.special_ids
            first = self.registry.vocabulary.end_id
            ends = dict.fromkeys(
                [first, *request.eos_token_ids, *(i for i in request.sampling.stop_token_ids if i in special)]
            )
            constrained = Constrained(request, list(ends), compiled.matcher(), gate=self._gate(request))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            self._fail(request, self._cause(request, error))
            return
        self._running[request.index] = constrained
        self._index[request.request_id] = request.index
        self._indices = None
        if request.output_token_ids is not None:
            self._advance(constrained, request.output_token_ids.tolist())

    def _gate(self, request: EngineCoreRequest) -> ReasoningGate | None:
        reasoning = request.sampling.reasoning
        return None if reasoning is None else ReasoningGate(reasoning, self.registry.vocabulary.tokenizer.token_bytes)

    @staticmethod
    def _cause(request: EngineCoreRequest, error: BaseException) -> RequestError:
        """A library may raise anything, also a panic from Rust: only the request with that grammar fails."""
        if isinstance(error, GrammarError):
            return invalid(str(error))
        logger.error("the grammar of request %r failed", request.request_id, exc_info=error)
        return library_failure(error)

    def _fail(self, request: EngineCoreRequest, error: RequestError) -> None:
        self.drop([request.request_id])
        spec = request.sampling.structured_outputs
        field = spec.field if spec is not None else "structured_outputs"
        named = RequestError(error.kind, f"{field}: {error.message}")
        self.failures.append(Failure(request.request_id, request.index, named))
