"""Grammars that take too long for a token, by a clock that the test moves."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from quire.structured_output import time_budget as module
from quire.structured_output.backends.base import CompiledGrammar, GrammarError
from quire.structured_output.time_budget import (
    BURST,
    LONG_TRIAL_BYTES,
    LONG_TRIAL_TOKENS,
    MIN_REFILL_PER_CALL,
    REFILL,
    TRIAL_TOKENS,
    with_time_budget,
)
from quire.structured_output.vocabulary import Vocabulary

TRIAL_CALLS = 2 * (TRIAL_TOKENS + LONG_TRIAL_TOKENS)  # at most: each token is a mask and a step


@dataclass
class Slow:
    """A grammar that allows everything; its n-th call takes `seconds[n]`, later ones the last of them."""

    seconds: list[float]
    num_bytes: int = 7
    now: float = 0.0
    calls: int = 0
    rolled_back: list[int] = field(default_factory=list)

    def matcher(self) -> "Slow":
        return self

    def _take(self) -> None:
        self.now += self.seconds[min(self.calls, len(self.seconds) - 1)]
        self.calls += 1

    def accept(self, token: int) -> bool:
        self._take()
        return True

    def rollback(self, count: int) -> None:
        self.rolled_back.append(count)

    def fill(self, row: np.ndarray) -> None:
        self._take()
        row[:] = 1


def with_clock(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> Slow:
    slow = Slow(list(seconds))
    monkeypatch.setattr(module.time, "thread_time", lambda: slow.now)
    return slow


def test_fast_grammars_pass_unchanged(monkeypatch: pytest.MonkeyPatch, vocabulary: Vocabulary) -> None:
    slow = with_clock(monkeypatch, REFILL / 2)
    compiled = with_time_budget(slow, vocabulary)
    assert compiled.num_bytes == 7 and 2 * TRIAL_TOKENS < slow.calls <= TRIAL_CALLS
    matcher = compiled.matcher()
    row = np.zeros(vocabulary.num_words, np.int32)
    for _ in range(500):
        matcher.fill(row)
        assert matcher.accept(0)
    matcher.rollback(3)
    assert row.any() and slow.rolled_back == [3]


def test_slow_from_the_first_token(monkeypatch: pytest.MonkeyPatch, vocabulary: Vocabulary) -> None:
    slow = with_clock(monkeypatch, BURST * 1.1)
    with pytest.raises(GrammarError, match="too long for each token"):
        with_time_budget(slow, vocabulary)
    assert slow.calls == 1


def test_slow_on_average(monkeypatch: pytest.MonkeyPatch, vocabulary: Vocabulary) -> None:
    slow = with_clock(monkeypatch, REFILL * 3)
    with pytest.raises(GrammarError):
        with_time_budget(slow, vocabulary)
    assert slow.calls > 3


def test_slow_later_ends_the_request_and_refuses_the_next(
    monkeypatch: pytest.MonkeyPatch, vocabulary: Vocabulary
) -> None:
    slow = with_clock(monkeypatch, 0.0)
    compiled = with_time_budget(slow, vocabulary)
    matcher = compiled.matcher()
    for _ in range(5):
        assert matcher.accept(0)
    slow.seconds = [BURST + 2 * REFILL]
    with pytest.raises(GrammarError, match="too long"):
        matcher.accept(0)
    with pytest.raises(GrammarError, match="too long"):
        compiled.matcher()


def test_all_sequences_share_one_budget(monkeypatch: pytest.MonkeyPatch, vocabulary: Vocabulary) -> None:
    slow = with_clock(monkeypatch, 0.0)
    compiled = with_time_budget(slow, vocabulary)
    matchers = [compiled.matcher() for _ in range(64)]
    row = np.zeros(vocabulary.num_words, np.int32)
    slow.seconds = [REFILL]  # which one sequence alone may take for ever
    began = slow.now
    refused = 0
    for _ in range(10):
        for matcher in matchers:
            try:
                matcher.fill(row)
            except GrammarError:
                refused += 1
    assert slow.now - began < BURST + 4 * REFILL
    assert refused > 9 * len(matchers)


def test_once_too_slow_no_sequence_calls_the_library(monkeypatch: pytest.MonkeyPatch, vocabulary: Vocabulary) -> None:
    slow = with_clock(monkeypatch, 0.0)
    compiled = with_time_budget(slow, vocabulary)
    first, other = compiled.matcher(), compiled.matcher()
    slow.seconds = [2 * BURST]
    with pytest.raises(GrammarError, match="too long"):
        first.accept(0)
    calls = slow.calls
    for call in (lambda: other.accept(0), lambda: other.fill(np.zeros(vocabulary.num_words, np.int32))):
        with pytest.raises(GrammarError, match="too long"):
            call()
    assert slow.calls == calls


def test_finished_sequences_do_not_reduce_the_budget_of_others(
    monkeypatch: pytest.MonkeyPatch, vocabulary: Vocabulary
) -> None:
    slow = with_clock(monkeypatch, 0.0)
    compiled = with_time_budget(slow, vocabulary)
    ended = [compiled.matcher() for _ in range(64)]
    ended.clear()
    last = compiled.matcher()
    slow.seconds = [REFILL]
    for _ in range(200):
        assert last.accept(0)


def test_many_sequences_of_an_ordinary_grammar(monkeypatch: pytest.MonkeyPatch, vocabulary: Vocabulary) -> None:
    slow = with_clock(monkeypatch, MIN_REFILL_PER_CALL)
    matchers = [compiled.matcher() for compiled in [with_time_budget(slow, vocabulary)] for _ in range(256)]
    for _ in range(10):
        assert all(matcher.accept(0) for matcher in matchers)


class SlowWithLength(Slow):
    """Takes longer with each byte, as ambiguous grammars do."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__([0.0])
        self.tokens = vocabulary.tokens

    def matcher(self) -> "SlowWithLength":
        self.num_text_bytes = 0
        return self

    def accept(self, token: int) -> bool:
        self.num_text_bytes += len(self.tokens[token])
        self.now += REFILL * (self.num_text_bytes / (LONG_TRIAL_BYTES / 4)) ** 3
        return True


def test_slow_with_the_length_of_the_text_is_found_in_the_trial(
    monkeypatch: pytest.MonkeyPatch, vocabulary: Vocabulary
) -> None:
    slow = SlowWithLength(vocabulary)
    monkeypatch.setattr(module.time, "thread_time", lambda: slow.now)
    with pytest.raises(GrammarError, match="too long"):
        with_time_budget(slow, vocabulary)


class Limited(Slow):
    """A library with a limit of its own after so many tokens."""

    def matcher(self) -> "Limited":
        self.num_tokens = 0
        return self

    def accept(self, token: int) -> bool:
        self.num_tokens += 1
        if self.num_tokens > TRIAL_TOKENS:
            raise GrammarError("too many items")
        return True


def test_library_limits_deep_in_the_text_are_no_reason_to_refuse(vocabulary: Vocabulary) -> None:
    assert with_time_budget(Limited([0.0]), vocabulary).matcher().accept(0)


# Its walk would take several times what is allowed.
@pytest.mark.parametrize("name", ["v", "renamed"])
def test_an_ambiguous_grammar_is_refused_before_it_is_used(compile: Callable[..., CompiledGrammar], name: str) -> None:
    rule = f'{name} {name} | {name} {name} {name} | [a-z ] | "a" {name}'
    with pytest.raises(GrammarError, match="too long for each token"):
        compile(grammar=f"root ::= {name}\n{name} ::= {rule}", backend="xgrammar")
