"""Rows that pool: they end with their prompt, and hold nothing afterwards."""

import pytest

from quire.messages.pooling_params import PoolingParams
from quire.messages.requests import FinishReason
from tests.core.fake_engine import FakeEngine, expected_pooled, expected_tokens

LAST, WHOLE = PoolingParams(), PoolingParams(skip_reading_prefix_cache=True)
PROMPT = list(range(10))


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_one_step_of_its_prompt_is_all_that_is_planned(depth):
    engine = FakeEngine(depth=depth)
    engine.add("a", PROMPT, pooling=LAST)
    plan = engine.plan()
    assert plan.num_tokens.tolist() == [10] and plan.new_rows[0].pooling is LAST
    assert engine.plan() is None  # nothing is left to compute
    engine.land()
    assert engine.finish == {"a": FinishReason.STOP} and engine.tokens["a"] == []
    assert engine.pooled["a"] == expected_pooled(PROMPT, whole=False)
    assert not engine.scheduler.has_unfinished() and engine.kv.pool.num_free == engine.kv.pool.num_blocks


def test_chunks_of_a_prompt_beside_a_row_that_decodes():
    engine = FakeEngine(depth=1, max_num_batched_tokens=4)
    engine.add("text", [5, 6], max_tokens=20)
    engine.add("pool", PROMPT, pooling=WHOLE)
    engine.run()
    assert engine.order == ["pool", "text"]
    assert engine.pooled["pool"] == expected_pooled(PROMPT, whole=True)
    assert engine.tokens["text"] == expected_tokens([5, 6], 20)


@pytest.mark.parametrize(("pooling", "computed"), [(LAST, 2), (WHOLE, 10)])
def test_a_cached_prefix_leaves_a_token_or_is_not_used(pooling, computed):
    engine = FakeEngine()
    engine.add("first", PROMPT, pooling=LAST)
    engine.run()
    engine.add("again", PROMPT, pooling=pooling)
    assert engine.plan().num_tokens.tolist() == [computed]
    engine.land()
    assert engine.pooled["again"] == expected_pooled(PROMPT, whole=pooling is WHOLE)


def test_what_arrives_after_an_abort_is_discarded():
    engine = FakeEngine(depth=1)
    engine.add("a", PROMPT, pooling=LAST)
    engine.add("b", PROMPT[:7], pooling=LAST)
    engine.plan()
    engine.abort("a")
    engine.land()
    assert list(engine.pooled) == ["b"] and engine.kv.pool.num_free == engine.kv.pool.num_blocks


def test_short_steps_while_few_requests_wait(monkeypatch):
    monkeypatch.setattr("quire.core.scheduler.FEW_WAITING", 6)
    engine = FakeEngine(max_num_batched_tokens=40, short_step_tokens=16, num_blocks=200)
    for i in range(10):
        engine.add(str(i), range(20 * i, 20 * i + 10), pooling=LAST)
    sizes = []
    while engine.scheduler.has_unfinished():
        sizes.append(len(engine.plan().rows))
        engine.land()
    assert sizes == [4, 2, 2, 2]  # of ten tokens each: a step goes on to 16 tokens or more
    assert len(engine.pooled) == 10


def test_a_text_longer_than_a_short_step_is_computed_whole():
    engine = FakeEngine(max_num_batched_tokens=40, short_step_tokens=5, chunked_prefill=False)
    engine.add("a", PROMPT, pooling=LAST)
    engine.add("b", range(30, 40), pooling=LAST)
    assert engine.plan().num_tokens.tolist() == [10]
    engine.land()
    assert engine.plan().num_tokens.tolist() == [10]


def test_prompts_in_chunks_go_on_beside_short_steps():
    engine = FakeEngine(max_num_batched_tokens=8, short_step_tokens=4)
    engine.add("a", range(20), pooling=LAST)
    engine.add("b", range(30, 36), pooling=LAST)
    engine.run()
    assert set(engine.pooled) == {"a", "b"}
