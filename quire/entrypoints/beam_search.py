"""Beam search, as `transformers` does it with `generate(num_beams=...)`.

A search asks the engine for one more token of each of its beams, with the likeliest candidates' logprobs, and chooses
among those. A beam's next request finds its KV blocks in the prefix cache, where beams of a common past share them;
only what does not fill a block is computed again.
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
    from quire.engine.llm_engine import LLMEngine  # with torch, which a server's front end does without

MAX_LENGTH_PENALTY = 100.0
EARLY_STOPPING = (False, True, "never")


class BeamSearchParams(msgspec.Struct):
    """Names and defaults follow vLLM; `early_stopping` is transformers'."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # no effect: nothing is drawn, and beams are ranked by the model's own logprobs
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        check_int("beam_width", self.beam_width, 1, MAX_N)
        check_int("max_tokens", self.max_tokens, 1, MAX_COUNT)
        check_finite("temperature", self.temperature)
        check(self.temperature >= 0, "temperature", self.temperature, "0 or more")
        check_finite("length_penalty", self.length_penalty)
        most = MAX_LENGTH_PENALTY
        allowed = f"between {-most:g} and {most:g} (0 is none, more favours long sequences)"
        check(abs(self.length_penalty) <= most, "length_penalty", self.length_penalty, allowed)
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
    score: float = 0.0  # cum_logprob / length ** length_penalty: what sequences are ranked by


@dataclass(slots=True)
class BeamSearchOutput:
    """The best sequences, at most beam_width, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class Beam:
    token_ids: list[int]  # what was generated
    entries: list[dict[int, Logprob]]
    cum_logprob: float
    score: float = 0.0
    finish_reason: str | None = None


@dataclass
class BeamSearch:
    """The search itself: which beams to continue, and what becomes of their candidates. Knows no engine."""

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
        # A beam may have to pass over each end of text, and beam_width others of one beam may be the best of all.
        count = min(self.params.beam_width + len(self.ends), self.vocab_size)
        return SamplingParams(
            temperature=0,
            max_tokens=1,
            logprobs=count,
            ignore_eos=True,
            detokenize=False,
            seed=0,  # nothing is drawn, and the engine's own sequence of seeds is for those who draw
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def prompts(self) -> list[ParsedPrompt]:
        """One for each running beam."""
        before, salt = self.prompt.token_ids, self.prompt.cache_salt
        return [ParsedPrompt(None, before + beam.token_ids, salt) for beam in self.running]

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        """What the engine had for `prompts`, in their order."""
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(f"the engine failed a step of the beam search: {output.error}")
        if self.num_cached_tokens is None:
            self.num_cached_tokens = outputs[0].num_cached_tokens
        self.advance([(output.outputs[0].logprobs or [{}])[0] for output in outputs])

    def advance(self, entries: Sequence[dict[int, Logprob]]) -> None:
        """The next token's likeliest candidates, for each running beam."""
        width, beams = self.params.beam_width, self.running
        candidates = [
            (beam.cum_logprob + found.logprob, place, token)
            for place, (beam, entry) in enumerate(zip(beams, entries, strict=True))
            for token, found in entry.items()
            if found.logprob > float("-inf")
        ]
        candidates.sort(key=lambda one: (-one[0], one[1], one[2]))
        self.length += 1
        last = self.length == self.limit
        self.running = []
        for rank, (cum_logprob, place, token) in enumerate(candidates):
            ends = token in self.ends
            if len(self.running) == width or (last and rank >= width):
                break
            if ends and rank >= width:
                continue  # only the best of all candidates may finish; the others stand in for those that did
            parent = beams[place]
            beam = Beam([*parent.token_ids, token], [*parent.entries, entries[place]], cum_logprob)
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
        """Whether there are sequences enough that no running beam is expected to beat."""
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
    """All searches to their end. Each goes on as soon as its own beams have come back, whatever the others do."""
    waiting = deque(searches)
    owner: dict[str, BeamSearch] = {}  # of each request under way
    asked: dict[int, list[str]] = {}  # by search
    arrived: dict[str, RequestOutput] = {}

    def ask(search: BeamSearch) -> None:
        params, ids = search.step_params, asked.setdefault(id(search), [])
        for prompt in search.prompts():
            request_id = new_id()
            engine.add_request(request_id, prompt, params)
            owner[request_id] = search
            ids.append(request_id)

    def take(output: RequestOutput) -> None:
        search = owner[output.request_id]
        arrived[output.request_id] = output
        ids = asked[id(search)]
        if not all(one in arrived for one in ids):
            return
        del asked[id(search)]
        for one in ids:
            del owner[one]
        search.take([arrived.pop(one) for one in ids])
        if search.done:
            ended(search)
        else:
            ask(search)

    most = concurrency_limit or len(searches)
    try:
        with interruption() as interrupted:
            while waiting or asked:
                while waiting and len(asked) < most:
                    ask(waiting.popleft())
                for output in engine.step():
                    if output.request_id in owner:  # others may have been added by hand to the same engine
                        take(output)
                if interrupted():
                    raise KeyboardInterrupt
    except BaseException:
        engine.abort_request(list(owner))
        raise
