"""The CPU tier under the real scheduler, with a worker that has no model: no content is ever lost or mixed up."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.distributed.kv_offload import tier_scheduler
from tests.core.fake_engine import expected_tokens, spec
from tests.core.test_properties import serve_and_check, workloads
from tests.kv_offload.tiered_engine import TieredEngine
from tests.properties import examples

BOTH = pytest.mark.parametrize("asynchronous", [False, True])


@settings(max_examples=examples(400), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(workloads(), st.data())
def test_outputs_do_not_depend_on_the_tier(workload, data):
    options, requests = workload
    engine = TieredEngine(
        num_slots=data.draw(st.integers(1, 40)),
        asynchronous=data.draw(st.booleans()),
        eviction=data.draw(st.sampled_from(["lru", "arc"])),
        lands=data.draw(st.sampled_from([lambda: True, every(2), every(5)])),
        **options,
    )
    resets = every(data.draw(st.sampled_from([10**9, 7, 31])))
    serve_and_check(engine, requests, lambda: resets() and engine.scheduler.reset_prefix_cache())
    engine.check_tier()


def every(count):
    """True at every so many calls."""
    calls = iter(range(10**9))
    return lambda: next(calls) % count == count - 1


def chat(user, turns):
    """Token ids of a user's first turns."""
    return [(user * 31 + i * 7) % 50 for i in range(16 * turns)]


@BOTH
@pytest.mark.parametrize("eviction", ["lru", "arc"])
@pytest.mark.parametrize("depth", [0, 1])
def test_hits_by_tier_are_those_of_the_script(asynchronous, eviction, depth):
    """Four users' chats of 32 tokens, one after the other, in a device cache for one: each second turn finds all blocks
    of the first turn in the tier, but for the last, which has not been computed to its end."""
    engine = TieredEngine(num_blocks=16, num_slots=100, asynchronous=asynchronous, eviction=eviction, depth=depth)
    for turns in (1, 2):
        for user in range(4):
            name = f"{user}.{turns}"
            engine.add(name, chat(user, turns), max_tokens=16)
            engine.run()
            assert engine.tokens[name] == expected_tokens(chat(user, turns), 16)
    stats = engine.tier.stats()
    assert stats.hits == 4 * 16 and stats.restored == 0 and stats.loaded_blocks == 4 * 4
    assert stats.queries == 4 * (16 + 32)
    assert stats.dropped_blocks == {}
    engine.check_tier()


@BOTH
def test_a_preempted_request_gets_its_blocks_back(asynchronous):
    engine = TieredEngine(num_blocks=24, num_slots=100, asynchronous=asynchronous, max_num_seqs=4)
    prompts = [chat(user, 1) for user in range(4)]
    for i, prompt in enumerate(prompts):
        engine.add(str(i), prompt, max_tokens=40)
    engine.run()
    for i, prompt in enumerate(prompts):
        assert engine.tokens[str(i)] == expected_tokens(prompt, 40)
    assert engine.scheduler.num_preemptions > 0
    assert engine.tier.stats().restored > 0
    engine.check_tier()


def test_a_window_is_loaded_without_the_blocks_before_it():
    specs = [spec(4), spec(4, 8)]
    engine = TieredEngine(num_blocks=40, num_slots=100, specs=specs)
    for name, prompt in (("a", chat(0, 4)), ("b", chat(1, 4)), ("c", chat(2, 4)), ("d", [*chat(0, 4), 1, 2])):
        engine.add(name, prompt, max_tokens=2)
        engine.run()
        assert engine.tokens[name] == expected_tokens(prompt, 2)
    stats = engine.tier.stats()
    assert stats.hits == 64 and stats.loaded_blocks == 16 + 2


def test_what_was_given_up_here_is_saved_again_when_it_is_hit_on_the_device():
    engine = TieredEngine(num_blocks=100, num_slots=4)
    for name in ("a", "b", "another", "a, which b has replaced here", "c"):
        engine.add(name, [*chat(ord(name[0]), 1), 1], max_tokens=1)
        engine.run()
    assert engine.kv.prefix_hits == 2 * 16
    assert engine.tier.stats().saved_blocks == 3 * 4


@BOTH
def test_a_reset_forgets_all_and_aborts_leave_nothing_behind(asynchronous):
    engine = TieredEngine(num_blocks=16, num_slots=100, asynchronous=asynchronous, lands=every(3))
    for user in range(3):
        engine.add(str(user), chat(user, 1), max_tokens=9)
        engine.run()
    engine.scheduler.reset_prefix_cache()
    assert len(engine.tier.index) == 0
    engine.add("again", chat(0, 1), max_tokens=9)
    engine.run()
    hits = engine.tier.stats().hits
    assert hits == 0
    for user in range(3):
        engine.add(f"{user} aborted", chat(user, 2), max_tokens=9)
        engine.step()
        engine.abort(f"{user} aborted")
    engine.run()
    engine.check_tier()


def test_a_block_that_is_evicted_while_copies_are_in_flight_is_dropped_and_counted(monkeypatch):
    monkeypatch.setattr(tier_scheduler, "MIN_SAVED_BLOCKS", 1)
    monkeypatch.setattr(tier_scheduler, "MAX_SAVING_BYTES", 2 << 20)  # two blocks
    engine = TieredEngine(num_blocks=10, num_slots=100, asynchronous=True, lands=lambda: False)
    for user in range(8):
        prompt = chat(user, 2)
        engine.add(str(user), prompt, max_tokens=4)
        engine.run()
        assert engine.tokens[str(user)] == expected_tokens(prompt, 4)
    stats = engine.tier.stats()
    assert stats.dropped_blocks["busy"] > 0 and stats.waits > 0
    engine.check_tier()
