"""Beam search, as `transformers` does it with `generate(num_beams=...)`.

A search asks the engine for one more token of each of its beams, with the top candidates' logprobs, and chooses
among those. A beam's next request hits the prefix cache, where beams with a common prefix share blocks; only the
tokens of a partial block are recomputed.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from quire.engine.input_processor import ParsedPrompt
from quire.engine.outputs import Logprob, RequestOutput
from quire.entrypoints.interruption import interruption
from quire.messages.sampling_params import (
    MAX_COUNT,
    MAX_N,
    RequestOutputKind,
    SamplingParams,
    check,
    check_finite,
    check_int,
)

if TYPE_CHECKING:
    from quire.engine.llm_engine import LLMEngine  # imports torch, which a server's front end does not

MAX_LENGTH_PENALTY = 100.0
EARLY_STOPPING = (False, True, "never")


class BeamSearchParams(msgspec.Struct):
    """Names and defaults follow vLLM; `early_stopping` is transformers'."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # no effect: beams are ranked by the model's own logprobs
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        check_int("beam_width", self.beam_width, 1, MAX_N)
        check_int("max_tokens", self.max_tokens, 1, MAX_COUNT)
        check_finite("temperature", self.temperature)
        check(self.temperature >= 0, "temperature", self.temperature, "0 or more")
        check_finite("length_penalty", self.length_penalty)
        limit = MAX_LENGTH_PENALTY
        allowed = f"between {-limit:g} and {limit:g} (0 is none, more favours long sequences)"
        check(abs(self.length_penalty) <= limit, "length_penalty", self.length_penalty, allowed)
        known = any(self.early_stopping is one or self.early_stopping == one == "never" for one in EARLY_STOPPING)
        check(known, "early_stopping", self.early_stopping, "false, true or 'never'")


@dataclass(slots=True)
class BeamSearchSequence:
    tokens: list[int]  # with the prompt, as in vLLM
    logprobs: list[dict[int, Logprob]]  # of the generated ones
    cum_logprob: float = 0.0
    text: str | None = None  # with the prompt
    finish_reason: str | None = None  # "stop" at the end of the text, "length" at max_tokens or the model's limit
    stop_reason: int | str | None = None
    score: float = 0.0  # cum_logprob / length ** length_penalty, which ranks the sequences


@dataclass(slots=True)
class BeamSearchOutput:
    """The best sequences, at most beam_width, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class Beam:
    token_ids: list[int]  # generated tokens
    entries: list[dict[int, Logprob]]
    cum_logprob: float
    score: float = 0.0
    finish_reason: str | None = None


@dataclass
class BeamSearch:
    """The search itself: which beams to continue, and which candidates to keep. Independent of the engine."""

    prompt: ParsedPrompt
    params: BeamSearchParams
    max_model_len: int
    eos_token_ids: Collection[int]
    vocab_size: int
    running: list[Beam] = field(default_factory=lambda: [Beam([], [], 0.0)])
    finished: list[Beam] = field(default_factory=list)
    length: int = 0  # tokens that every running beam has
    done: bool = False
    num_cached_tokens: int | None = None  # of the prompt

    def __post_init__(self) -> None:
        self.limit = max(1, min(self.params.max_tokens, self.max_model_len - len(self.prompt.token_ids)))
        self.ends = frozenset(() if self.params.ignore_eos else self.eos_token_ids)

    @property
    def step_params(self) -> SamplingParams:
        # EOS candidates may be skipped, and the best beam_width others may all extend one beam.
        count = min(self.params.beam_width + len(self.ends), self.vocab_size)
        return SamplingParams(
            temperature=0,
            max_tokens=1,
            logprobs=count,
            ignore_eos=True,
            detokenize=False,
            seed=0,  # greedy: do not consume the engine's sequence of seeds
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def prompts(self) -> list[ParsedPrompt]:
        """One per running beam."""
        before = self.prompt
        return [
            ParsedPrompt(
                None, before.token_ids + beam.token_ids, before.cache_salt, features=before.features, lora=before.lora
            )
            for beam in self.running
        ]

    def process_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        """Process the engine's outputs for `prompts`, in their order."""
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(f"the engine failed a step of the beam search: {output.error}")
        if self.num_cached_tokens is None:
            self.num_cached_tokens = outputs[0].num_cached_tokens
        self.advance([(output.outputs[0].logprobs or [{}])[0] for output in outputs])

    def advance(self, entries: Sequence[dict[int, Logprob]]) -> None:
        """Extend the beams, given each running beam's top candidates for the next token."""
        width, beams = self.params.beam_width, self.running
        candidates = [
            (beam.cum_logprob + found.logprob, parent_index, token)
            for parent_index, (beam, entry) in enumerate(zip(beams, entries, strict=True))
            for token, found in entry.items()
            if found.logprob > float("-inf")
        ]
        candidates.sort(key=lambda one: (-one[0], one[1], one[2]))
        self.length += 1
        last = self.length == self.limit
        self.running = []
        for rank, (cum_logprob, parent_index, token) in enumerate(candidates):
            ends = token in self.ends
            if len(self.running) == width or (last and rank >= width):
                break
            if ends and rank >= width:
                continue  # only the top beam_width candidates may finish; the rest only refill the running beams
            parent = beams[parent_index]
            beam = Beam([*parent.token_ids, token], [*parent.entries, entries[parent_index]], cum_logprob)
            if ends or last:
                beam.score = self.score(cum_logprob, self.length)
                beam.finish_reason = "stop" if ends else "length"
                self.finished.append(beam)
            else:
                self.running.append(beam)
        self.finished.sort(key=lambda beam: -beam.score)
        del self.finished[width:]
        self.done = not self.running or (len(self.finished) == width and self._may_stop())

    def score(self, cum_logprob: float, length: int) -> float:
        return cum_logprob / length**self.params.length_penalty

    def _may_stop(self) -> bool:
        """Whether no running beam is expected to beat the finished ones."""
        early, penalty = self.params.early_stopping, self.params.length_penalty
        if early is True:
            return True
        longest = self.limit if early == "never" and penalty > 0 else self.length
        return self.score(self.running[0].cum_logprob, longest) <= self.finished[-1].score

    def result(self) -> BeamSearchOutput:
        return BeamSearchOutput([self._sequence(beam) for beam in self.finished])

    def _sequence(self, beam: Beam) -> BeamSearchSequence:
        drop = beam.finish_reason == "stop" and not self.params.include_stop_str_in_output
        count = len(beam.token_ids) - drop
        return BeamSearchSequence(
            tokens=self.prompt.token_ids + beam.token_ids[:count],
            logprobs=beam.entries[:count],
            cum_logprob=beam.cum_logprob,
            finish_reason=beam.finish_reason,
            score=beam.score,
        )


def check_engine(logprobs_mode: str) -> None:
    if logprobs_mode.endswith("logits"):
        raise ValueError(f"beam search ranks by logprobs; the engine gives logits (--logprobs-mode {logprobs_mode})")


def run_searches(
    engine: "LLMEngine",
    searches: Sequence[BeamSearch],
    new_id: Callable[[], str],
    concurrency_limit: int | None = None,
    ended: Callable[[BeamSearch], None] = lambda search: None,
) -> None:
    """Run all searches. Each advances as soon as its own beams have finished, independent of the others."""
    waiting = deque(searches)
    owner: dict[str, BeamSearch] = {}  # search of each request in flight
    in_flight: dict[int, list[str]] = {}  # request ids by search
    outputs: dict[str, RequestOutput] = {}

    def submit(search: BeamSearch) -> None:
        params, ids = search.step_params, in_flight.setdefault(id(search), [])
        for prompt in search.prompts():
            request_id = new_id()
            engine.add_request(request_id, prompt, params)
            owner[request_id] = search
            ids.append(request_id)

    def collect(output: RequestOutput) -> None:
        search = owner[output.request_id]
        outputs[output.request_id] = output
        ids = in_flight[id(search)]
        if not all(one in outputs for one in ids):
            return
        del in_flight[id(search)]
        for one in ids:
            del owner[one]
        search.process_outputs([outputs.pop(one) for one in ids])
        if search.done:
            ended(search)
        else:
            submit(search)

    limit = concurrency_limit or len(searches)
    try:
        with interruption() as interrupted:
            while waiting or in_flight:
                while waiting and len(in_flight) < limit:
                    submit(waiting.popleft())
                for output in engine.step():
                    if output.request_id in owner:  # the user may have added other requests to the engine
                        collect(output)
                if interrupted():
                    raise KeyboardInterrupt
    except BaseException:
        engine.abort_request(list(owner))
        raise
