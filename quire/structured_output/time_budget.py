"""A time budget for grammars that compile quickly but then take long for each token, delaying every request's step.

A library's call cannot be interrupted, but it can be measured before serving: trial runs of a few tokens on the
compiler's thread find most slow grammars. One that becomes slow later fails all its requests as soon as these together
have used up the grammar's budget.
"""

import random
import time
import weakref
from collections.abc import Callable

import numpy as np

from quire.structured_output.backends.base import CompiledGrammar, GrammarError, Matcher
from quire.structured_output.vocabulary import Vocabulary

# In CPU seconds of the thread, so that a busy machine changes nothing. A mask usually takes 0.0001.
BURST = 0.5  # budget of one grammar, whatever its number of sequences
REFILL = 0.02  # per step of all its sequences: each call adds this divided by their number
MIN_REFILL_PER_CALL = 0.001  # so that many sequences with an ordinary grammar are not rejected
TRIAL_TOKENS = 12
# The cost of ambiguity grows with the length of the text, so the second trial prefers long tokens.
LONG_TRIAL_TOKENS = 32
LONG_TRIAL_BYTES = 256
LONG_TRIAL_SAMPLE = 64  # the longest of this sample: the longest of all would be the same run of spaces each time


class TimeBudget:
    """CPU time of one grammar, refilled with each call and shared by all its sequences: once exhausted, all fail."""

    def __init__(self) -> None:
        self.too_slow = False
        self._left = BURST  # seconds
        self._matchers: weakref.WeakSet[TimedMatcher] = weakref.WeakSet()

    def add(self, matcher: "TimedMatcher") -> None:
        self._matchers.add(matcher)

    def check(self) -> None:
        if self.too_slow:
            raise GrammarError("it takes too long for each token; make it less ambiguous, or its repeats smaller")

    def spend(self, seconds: float) -> None:
        refill = max(REFILL / max(len(self._matchers), 1), MIN_REFILL_PER_CALL)
        self._left = min(BURST, self._left + refill) - seconds
        if self._left < 0:
            self.too_slow = True
            self.check()

    def restart(self) -> None:
        self._left = BURST


class TimedMatcher:
    def __init__(self, matcher: Matcher, budget: TimeBudget) -> None:
        self._matcher = matcher
        self._budget = budget
        budget.add(self)

    def accept(self, token: int) -> bool:
        self._budget.check()
        began = time.thread_time()
        accepted = self._matcher.accept(token)
        self._budget.spend(time.thread_time() - began)
        return accepted

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)

    def fill(self, row: np.ndarray) -> None:
        self._budget.check()
        began = time.thread_time()
        self._matcher.fill(row)
        self._budget.spend(time.thread_time() - began)


class TimedGrammar:
    def __init__(self, compiled: CompiledGrammar) -> None:
        self._compiled = compiled
        self.budget = TimeBudget()
        self.num_bytes = compiled.num_bytes

    def matcher(self) -> TimedMatcher:
        self.budget.check()
        return TimedMatcher(self._compiled.matcher(), self.budget)


def with_time_budget(compiled: CompiledGrammar, vocabulary: Vocabulary) -> TimedGrammar:
    """The grammar with a time budget, after two trial runs. GrammarError if these exceed it."""
    timed = TimedGrammar(compiled)
    draw = random.Random(0)

    def any_token(allowed: np.ndarray) -> int:
        return int(allowed[draw.randrange(len(allowed))])

    def long_token(allowed: np.ndarray) -> int:
        places = draw.sample(range(len(allowed)), min(LONG_TRIAL_SAMPLE, len(allowed)))
        return max(allowed[places].tolist(), key=lambda token: len(vocabulary.tokens[token]))

    _run_trial(timed, vocabulary, any_token, TRIAL_TOKENS)
    timed.budget.restart()
    try:
        _run_trial(timed, vocabulary, long_token, LONG_TRIAL_TOKENS, LONG_TRIAL_BYTES)
    except GrammarError:
        # A library's own limit, deep in a long text, should only fail the requests that reach it.
        timed.budget.check()
    timed.budget.restart()
    return timed


def _run_trial(
    timed: TimedGrammar,
    vocabulary: Vocabulary,
    choose: Callable[[np.ndarray], int],
    max_tokens: int,
    max_bytes: int | None = None,
) -> None:
    matcher = timed.matcher()
    row = np.zeros(vocabulary.num_words, np.int32)
    num_bytes = 0
    for _ in range(max_tokens):
        if max_bytes is not None and num_bytes >= max_bytes:
            return
        matcher.fill(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        allowed = allowed[allowed != vocabulary.end_id]
        if not len(allowed):
            return
        token = choose(allowed)
        if not matcher.accept(token):
            return
        num_bytes += len(vocabulary.tokens[token])
