"""What the core reports about time and load: when a request was first scheduled, and how large steps were."""

import time

import pytest

from quire.messages.requests import STEP_TOKEN_BOUNDS
from tests.core.fake_engine import FakeEngine


class FirstTokens:
    """Notes which requests' outputs say when they were first scheduled, and with which of their tokens."""

    def __init__(self, engine):
        self.times = {}
        self.stats = None
        update = engine.scheduler.update_from_output

        def noting(plan, output):
            outputs = update(plan, output)
            for place, at in outputs.scheduled.items():
                name = engine.names[int(outputs.index[place])]
                assert name not in self.times, "returned twice"
                assert engine.tokens[name] == [], "returned after the first token"
                self.times[name] = at
            self.stats = outputs.stats
            return outputs

        engine.scheduler.update_from_output = noting


@pytest.mark.parametrize("depth", [0, 2])
def test_the_first_token_says_when_its_request_was_scheduled(depth):
    engine = FakeEngine(depth=depth, max_num_seqs=1, max_num_batched_tokens=4)
    noted = FirstTokens(engine)
    began = time.monotonic()
    engine.add("a", range(10), max_tokens=3)  # three steps for the prompt
    engine.add("b", range(3), max_tokens=3)
    engine.run()
    assert began <= noted.times["a"] < noted.times["b"] <= time.monotonic()
    assert engine.scheduler.results.num_prompt_tokens == 13 and engine.scheduler.results.num_generated_tokens == 6
    assert not engine.scheduler.running.num_awaiting_first_token


def test_a_preempted_request_keeps_its_time():
    engine = FakeEngine(num_blocks=8, depth=1)
    noted = FirstTokens(engine)
    for name in ("a", "b", "c"):
        engine.add(name, range(8), max_tokens=12, salt=name)
    engine.run()
    assert engine.scheduler.num_preemptions
    assert noted.times.keys() == {"a", "b", "c"}
    assert noted.stats.num_preemptions == engine.scheduler.num_preemptions


def test_one_that_ends_before_its_first_token_leaves_nothing():
    engine = FakeEngine(depth=0, max_num_batched_tokens=4)
    noted = FirstTokens(engine)
    engine.add("a", range(10))
    engine.step()
    engine.abort("a")
    engine.run()
    assert not noted.times and not engine.scheduler.running.num_awaiting_first_token


def test_forks_count_their_prompt_once():
    engine = FakeEngine()
    noted = FirstTokens(engine)
    engine.add("a", range(9), max_tokens=2, n=2)
    engine.add("a1", range(9), max_tokens=2, n=2, fork_of="a")
    engine.run()
    assert noted.times.keys() == {"a", "a1"}
    assert engine.scheduler.results.num_prompt_tokens == 9


def test_steps_are_counted_by_size():
    engine = FakeEngine(max_num_batched_tokens=20)
    noted = FirstTokens(engine)
    engine.add("a", range(30), max_tokens=3)  # steps of 20, 10 + 1, 1, 1 tokens
    engine.run()
    sizes = dict(zip([*STEP_TOKEN_BOUNDS, None], noted.stats.step_tokens, strict=True))
    assert {bound: count for bound, count in sizes.items() if count} == {1: 2, 16: 1, 32: 1}
    assert noted.stats.step_tokens_sum == 33
