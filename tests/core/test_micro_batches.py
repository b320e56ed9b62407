"""With stages in a pipeline, plans in flight are of different requests."""

import pytest

from tests.core.fake_engine import FakeEngine, expected_tokens


def in_flight(engine) -> list[set[int]]:
    return [set(plan.rows.tolist()) for plan, _ in engine.in_flight]


def test_rows_are_dealt_to_stages_in_equal_parts():
    engine = FakeEngine(num_stages=3, depth=2)
    for i in range(7):
        engine.add(str(i), [i, 1, 2], max_tokens=9)
    engine.step()  # all prompts in one plan, and its results
    for _ in range(3):
        engine.plan()
    assert [len(rows) for rows in in_flight(engine)] == [3, 3, 1]
    assert engine.plan() is None
    engine.run()
    assert all(engine.tokens[str(i)] == expected_tokens([i, 1, 2], 9) for i in range(7))


def test_chunks_of_a_prompt_follow_one_another_without_waiting():
    engine = FakeEngine(num_stages=2, depth=1, max_num_batched_tokens=8)
    engine.add("long", range(20), max_tokens=3)
    plans = [engine.plan() for _ in range(3)]
    assert [plan.total_tokens for plan in plans] == [8, 8, 4]
    assert engine.plan() is None  # its first token is in flight
    engine.run()
    assert engine.tokens["long"] == expected_tokens(range(20), 3)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_token_in_flight_is_never_read(stages):
    engine = FakeEngine(num_stages=stages, depth=stages - 1, num_blocks=30, max_model_len=40, max_num_batched_tokens=12)
    prompts = {str(i): list(range(i, i + 3 + 5 * i % 17)) for i in range(9)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=12)
    while engine.scheduler.has_unfinished() or engine.in_flight:
        engine.step()
        engine.check_books()
        assert engine.scheduler.running.num_pending.max() <= 1
    for name, prompt in prompts.items():
        assert engine.tokens[name] == expected_tokens(prompt, 12)
