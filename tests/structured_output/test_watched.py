"""Grammars that take too long for a token, by a clock that the test moves."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from quire.structured_output import watched as module
from quire.structured_output.base import GrammarError
from quire.structured_output.vocabulary import Vocabulary
from quire.structured_output.watched import BURST, PER_CALL, TRIAL_TOKENS, watched


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


def test_quick_ones_pass_unchanged(monkeypatch: pytest.MonkeyPatch, vocabulary: Vocabulary) -> None:
    slow = with_clock(monkeypatch, PER_CALL / 2)
    compiled = watched(slow, vocabulary)
    assert compiled.num_bytes == 7 and slow.calls == 2 * TRIAL_TOKENS
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
        watched(slow, vocabulary)
    assert slow.calls == 1


def test_slow_on_average(monkeypatch: pytest.MonkeyPatch, vocabulary: Vocabulary) -> None:
    slow = with_clock(monkeypatch, PER_CALL * 3)
    with pytest.raises(GrammarError):
        watched(slow, vocabulary)
    assert slow.calls > 3


def test_slow_later_ends_the_request_and_refuses_the_next(
    monkeypatch: pytest.MonkeyPatch, vocabulary: Vocabulary
) -> None:
    slow = with_clock(monkeypatch, *[0.0] * (2 * TRIAL_TOKENS + 5), BURST + 2 * PER_CALL)
    compiled = watched(slow, vocabulary)
    matcher = compiled.matcher()
    for _ in range(5):
        assert matcher.accept(0)
    with pytest.raises(GrammarError, match="too long"):
        matcher.accept(0)
    with pytest.raises(GrammarError, match="too long"):
        compiled.matcher()
