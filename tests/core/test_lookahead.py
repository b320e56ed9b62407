"""Room for what a proposer's layers write behind a step, and hits that leave them a block to compute."""

import pytest

from tests.core.fake_engine import FakeEngine, expected_tokens, spec

PROMPT = list(range(3, 40))


def num_blocks(engine: FakeEngine, name: str) -> int:
    return len(engine.scheduler.requests[name].blocks[0])


def test_blocks_reach_as_far_as_drafts_are_computed():
    """Whatever a step may accept, its proposal writes up to as many positions behind that."""
    engine = FakeEngine(specs=[spec(block_size=1)], num_drafts=3, num_lookahead=3)
    engine.add("a", PROMPT, 60)
    engine.step()
    assert num_blocks(engine, "a") == len(PROMPT) + 3
    engine.plan()
    assert num_blocks(engine, "a") == len(PROMPT) + 1 + 3 + 3


@pytest.mark.parametrize("num_lookahead", [0, 3])
def test_no_one_is_preempted_for_them(num_lookahead):
    """Two requests fill the cache to the last token."""
    engine = FakeEngine(specs=[spec(block_size=1)], num_blocks=24, num_drafts=3, num_lookahead=num_lookahead)
    engine.add("a", PROMPT[:4], 9)
    engine.add("b", PROMPT[:4], 9)
    engine.run()
    assert engine.scheduler.num_preemptions == 0
    assert engine.tokens["a"] == engine.tokens["b"] == expected_tokens(PROMPT[:4], 9)


@pytest.mark.parametrize(("length", "cached"), [(37, 16), (33, 16), (32, 0), (9, 0)])
def test_hits_are_a_block_shorter_for_hidden_states(length, cached):
    engine = FakeEngine(specs=[spec(block_size=16)])
    engine.kv.recomputes_last_block = True
    engine.add("a", PROMPT, 4)
    engine.run()
    engine.add("b", PROMPT[:length], 4)
    assert engine.plan().new_rows[0].num_computed == cached
    engine.run()
    assert engine.tokens["b"] == expected_tokens(PROMPT[:length], 4)
