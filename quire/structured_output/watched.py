"""Grammars that compile quickly but then take long for each token: they would hold up every other request's step.

What a library computes cannot be stopped, but it can be tried before it matters: walks of a few tokens on the
compiler's thread find most of them. Those that grow slow later end all their requests as soon as these together have
used up what one grammar may take.
"""

import random
import time
import weakref
from collections.abc import Callable

import numpy as np

from quire.structured_output.backends.base import Compiled, GrammarError, Matcher
from quire.structured_output.vocabulary import Vocabulary

# Processor seconds of the thread, so that a busy machine changes nothing. Masks usually take 0.0001.
BURST = 0.5  # of one grammar, whatever the number of sequences under it
PER_CALL = 0.02  # comes back with each call, divided by the number of sequences: as much for a step of all of them
PER_CALL_LEAST = 0.001  # but no less: many sequences under a usual grammar are no fault of it
TRIAL_TOKENS = 12
# Ambiguity costs by the length of the text, so the second walk prefers long tokens.
LONG_TRIAL_TOKENS = 32
LONG_TRIAL_BYTES = 256
LONG_TRIAL_SAMPLE = 64  # the longest of so many: of all, it would be the same run of spaces again and again


class Watch:
    """The time of one grammar, shared by all its sequences: once it was too slow for one, it is refused to all."""

    def __init__(self) -> None:
        self.too_slow = False
        self._left = BURST
        self._matchers: weakref.WeakSet[WatchedMatcher] = weakref.WeakSet()

    def add(self, matcher: "WatchedMatcher") -> None:
        self._matchers.add(matcher)

    def check(self) -> None:
        if self.too_slow:
            raise GrammarError("it takes too long for each token; make it less ambiguous, or its repeats smaller")

    def spend(self, seconds: float) -> None:
        back = max(PER_CALL / max(len(self._matchers), 1), PER_CALL_LEAST)
        self._left = min(BURST, self._left + back) - seconds
        if self._left < 0:
            self.too_slow = True
            self.check()

    def restart(self) -> None:
        self._left = BURST


class WatchedMatcher:
    def __init__(self, matcher: Matcher, watch: Watch) -> None:
        self._matcher = matcher
        self._watch = watch
        watch.add(self)

    def accept(self, token: int) -> bool:
        self._watch.check()
        began = time.thread_time()
        accepted = self._matcher.accept(token)
        self._watch.spend(time.thread_time() - began)
        return accepted

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)

    def fill(self, row: np.ndarray) -> None:
        self._watch.check()
        began = time.thread_time()
        self._matcher.fill(row)
        self._watch.spend(time.thread_time() - began)


class WatchedCompiled:
    def __init__(self, compiled: Compiled) -> None:
        self._compiled = compiled
        self.watch = Watch()
        self.num_bytes = compiled.num_bytes

    def matcher(self) -> WatchedMatcher:
        self.watch.check()
        return WatchedMatcher(self._compiled.matcher(), self.watch)


def watched(compiled: Compiled, vocabulary: Vocabulary) -> WatchedCompiled:
    """The same grammar, after a trial. GrammarError if it is too slow already."""
    tried = WatchedCompiled(compiled)
    draw = random.Random(0)

    def any_token(allowed: np.ndarray) -> int:
        return int(allowed[draw.randrange(len(allowed))])

    def long_token(allowed: np.ndarray) -> int:
        places = draw.sample(range(len(allowed)), min(LONG_TRIAL_SAMPLE, len(allowed)))
        return max(allowed[places].tolist(), key=lambda token: len(vocabulary.tokens[token]))

    _walk(tried, vocabulary, any_token, TRIAL_TOKENS)
    tried.watch.restart()
    try:
        _walk(tried, vocabulary, long_token, LONG_TRIAL_TOKENS, LONG_TRIAL_BYTES)
    except GrammarError:
        # A library's own limit, far into a text that few requests come to, ends only those that do.
        tried.watch.check()
    tried.watch.restart()
    return tried


def _walk(
    tried: WatchedCompiled,
    vocabulary: Vocabulary,
    choose: Callable[[np.ndarray], int],
    max_tokens: int,
    max_bytes: int | None = None,
) -> None:
    matcher = tried.matcher()
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
