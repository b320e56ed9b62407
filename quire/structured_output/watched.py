"""Grammars that compile quickly but then take long for each token: they would hold up every other request's step.

What a library computes cannot be stopped, but it can be tried before it matters: a walk of a few tokens on the
compiler's thread finds most of them. Those that grow slow later end their request with the first step that was.
"""

import random
import time

import numpy as np

from quire.structured_output.base import Compiled, GrammarError, Matcher
from quire.structured_output.vocabulary import Vocabulary

# Processor seconds of the thread, so that a busy machine changes nothing. Masks usually take 0.0001.
BURST = 0.5
PER_CALL = 0.02
TRIAL_TOKENS = 12


class Watch:
    """Of one grammar: once it was too slow for a request, it is refused to all."""

    def __init__(self) -> None:
        self.too_slow = False

    def refuse(self) -> None:
        self.too_slow = True
        raise GrammarError("it takes too long for each token; make it less ambiguous, or its repeats smaller")


class WatchedMatcher:
    def __init__(self, matcher: Matcher, watch: Watch) -> None:
        self._matcher = matcher
        self._watch = watch
        self._left = BURST

    def accept(self, token: int) -> bool:
        began = time.thread_time()
        accepted = self._matcher.accept(token)
        self._spend(began)
        return accepted

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)

    def fill(self, row: np.ndarray) -> None:
        began = time.thread_time()
        self._matcher.fill(row)
        self._spend(began)

    def _spend(self, began: float) -> None:
        self._left = min(BURST, self._left + PER_CALL) - (time.thread_time() - began)
        if self._left < 0:
            self._watch.refuse()


class WatchedCompiled:
    def __init__(self, compiled: Compiled) -> None:
        self._compiled = compiled
        self._watch = Watch()
        self.num_bytes = compiled.num_bytes

    def matcher(self) -> WatchedMatcher:
        if self._watch.too_slow:
            self._watch.refuse()
        return WatchedMatcher(self._compiled.matcher(), self._watch)


def watched(compiled: Compiled, vocabulary: Vocabulary) -> WatchedCompiled:
    """The same grammar, after a trial. GrammarError if it is too slow already."""
    tried = WatchedCompiled(compiled)
    matcher = tried.matcher()
    row = np.zeros(vocabulary.num_words, np.int32)
    draw = random.Random(0)
    for _ in range(TRIAL_TOKENS):
        matcher.fill(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        allowed = allowed[allowed != vocabulary.end_id]
        if not len(allowed) or not matcher.accept(int(allowed[draw.randrange(len(allowed))])):
            break
    return tried
