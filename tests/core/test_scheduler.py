import pytest

from quire.distributed.kv_connector import KVConnector
from quire.messages.kv_transfer import FinishedTransfers
from quire.messages.requests import FinishReason
from tests.core.fake_engine import FakeEngine, expected_tokens, spec, state_spec

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


def assert_expected(engine, prompts, max_tokens, **seeds):
    for name, prompt in prompts.items():
        assert engine.tokens[name] == expected_tokens(prompt, max_tokens, seeds.get(name, 0)), name


def planned(engine):
    plan = engine.plan()
    requests = engine.scheduler.running.requests
    return {requests[row].request_id: int(n) for row, n in zip(plan.rows, plan.num_tokens, strict=True)}


def test_a_step_mixes_prompts_and_decodes_within_the_budget():
    engine = FakeEngine(max_num_batched_tokens=20)
    engine.add("a", range(12))
    assert planned(engine) == {"a": 12}
    engine.land()
    engine.add("b", range(50, 80))
    assert planned(engine) == {"a": 1, "b": 19}
    engine.land()
    assert planned(engine) == {"a": 1, "b": 11}


def test_a_scheduler_that_admits_nobody_ends_what_runs():
    engine = FakeEngine()
    engine.add("runs", range(12))
    assert planned(engine) == {"runs": 12}
    engine.scheduler.admits = False
    engine.add("waits", range(50, 60))
    engine.run()
    assert engine.order == ["runs"] and not engine.scheduler.has_unfinished()
    engine.scheduler.admits = True
    engine.run()
    assert engine.order == ["runs", "waits"]


def test_long_prompts_are_cut_at_the_threshold():
    engine = FakeEngine(max_num_batched_tokens=64, long_prefill_token_threshold=10)
    engine.add("a", range(25))
    engine.add("b", range(50, 60))
    assert planned(engine) == {"a": 10, "b": 10}
    engine.land()
    assert planned(engine) == {"a": 10, "b": 1}


def test_without_chunking_a_prompt_waits_for_a_whole_budget():
    engine = FakeEngine(max_num_batched_tokens=32, chunked_prefill=False)
    engine.add("a", range(20))
    engine.add("b", range(50, 70))
    assert planned(engine) == {"a": 20}
    engine.land()
    assert planned(engine) == {"a": 1, "b": 20}


def test_priority_goes_first_and_is_preempted_last():
    engine = FakeEngine(policy="priority", max_num_seqs=1)
    engine.add("late", range(5), priority=5)
    engine.add("soon", range(50, 55), priority=-1)
    engine.run()
    assert engine.order == ["soon", "late"]

    engine = FakeEngine(policy="priority", num_blocks=8, max_model_len=32)
    prompts = {"low": range(14), "high": range(50, 64)}
    engine.add("low", prompts["low"], max_tokens=10, priority=1)
    engine.add("high", prompts["high"], max_tokens=10, priority=0)
    engine.run()
    assert engine.scheduler.num_preemptions > 0 and engine.order == ["high", "low"]
    assert_expected(engine, prompts, 10)


@DEPTHS
def test_preempted_requests_come_back_with_the_same_tokens(depth):
    engine = FakeEngine(num_blocks=9, depth=depth, max_model_len=32)
    prompts = {f"r{i}": range(i * 10, i * 10 + 8) for i in range(4)}
    for i, (name, prompt) in enumerate(prompts.items()):
        engine.add(name, prompt, max_tokens=15, seed=i)
    while engine.scheduler.has_unfinished():
        engine.step()
        engine.check_books()
    assert engine.scheduler.num_preemptions > 0
    assert_expected(engine, prompts, 15, **{f"r{i}": i for i in range(4)})
    assert engine.order[0] == "r0"


def test_the_prefix_hit_rate_counts_a_request_once():
    """What comes back after a preemption finds its own blocks; a hit rate with those would rise with every one."""
    engine = FakeEngine(num_blocks=9, max_model_len=32)
    for i in range(4):
        engine.add(f"r{i}", range(i * 10, i * 10 + 8), max_tokens=15)
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    stats = engine.scheduler.stats()
    assert stats.prefix_cache_queries == 4 * 8 and stats.prefix_cache_hits == 0
    engine.add("again", range(30, 39))
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.prefix_cache_queries == 4 * 8 + 9 and stats.prefix_cache_hits == 8


def test_the_prefix_hit_rate_leaves_out_requests_that_do_not_read_the_cache():
    engine = FakeEngine()
    for name in ("first", "second"):
        engine.add(name, range(8), prompt_logprobs=1)
        engine.run()
    assert engine.scheduler.stats().prefix_cache_queries == 0
    engine.add("third", range(9))
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.prefix_cache_queries == 9 and stats.prefix_cache_hits == 8


def test_a_preempted_request_waits_for_its_plans_in_flight():
    engine = FakeEngine(num_blocks=6, depth=2, max_model_len=24)
    engine.add("old", range(8), max_tokens=16)
    engine.add("new", range(20, 30), max_tokens=12)
    while not engine.scheduler.num_preemptions:
        engine.step()
        assert engine.scheduler.has_unfinished()
    new = engine.scheduler.requests["new"]
    assert new.frames_to_discard > 0 and new in engine.scheduler.queue.blocked
    while new.frames_to_discard:
        assert new.row < 0
        engine.land()
    assert new not in engine.scheduler.queue.blocked
    engine.run()
    assert_expected(engine, {"old": range(8)}, 16)
    assert_expected(engine, {"new": range(20, 30)}, 12)


class Unlisted(dict):
    """Requests that may be looked up, not gone through: there may be very many."""

    def values(self):
        raise AssertionError("went through all requests")

    __iter__ = items = values


def test_a_step_does_not_go_through_waiting_requests():
    engine = FakeEngine(num_blocks=8)
    engine.add("running", range(16), max_tokens=12)
    for i in range(200):
        engine.add(str(i), range(100, 120))  # needs more blocks than are left
    engine.scheduler.requests = Unlisted(engine.scheduler.requests)
    for _ in range(5):
        engine.step()
    assert len(engine.scheduler.running) == 1
    for i in range(200):
        engine.abort(str(i))
    assert len(engine.scheduler.queue._heap) <= 64  # those that have left go too
    while "running" in engine.scheduler.requests:
        engine.step()


@DEPTHS
def test_requests_end_at_their_limits(depth):
    engine = FakeEngine(depth=depth, max_model_len=20)
    engine.add("short", range(5), max_tokens=1)
    engine.add("model limit", range(15), max_tokens=50)
    tokens = expected_tokens(range(30, 35), 8)
    engine.add("stop", range(30, 35), max_tokens=8, stop=[tokens[3]])
    engine.add("eos", range(30, 35), max_tokens=8, eos=[tokens[2]])
    engine.add("no eos", range(30, 35), max_tokens=8, eos=[tokens[2]], ignore_eos=True)
    engine.run()
    lengths = {name: len(t) for name, t in engine.tokens.items()}
    assert lengths == {"short": 1, "model limit": 5, "stop": 4, "eos": 3, "no eos": 8}
    reasons = {name: str(reason) for name, reason in engine.finish.items()}
    assert reasons == {"short": "length", "model limit": "length", "stop": "stop", "eos": "stop", "no eos": "length"}
    assert engine.kv.pool.num_free == engine.kv.pool.num_blocks


@DEPTHS
def test_a_request_of_the_same_plan_shares_the_prefix(depth):
    engine = FakeEngine(depth=depth)
    prompts = {"a": range(20), "b": [*range(16), 40, 41], "c": range(20)}
    for name, prompt in prompts.items():
        engine.add(name, prompt)
    first = planned(engine)
    assert first == {"a": 20, "b": 2, "c": 4}
    engine.run()
    assert_expected(engine, prompts, 8)


def test_a_salt_separates_equal_prompts():
    engine = FakeEngine()
    engine.add("a", range(20))
    engine.add("b", range(20), salt="other tenant")
    assert planned(engine) == {"a": 20, "b": 20}


def test_generated_blocks_serve_the_next_turn():
    engine = FakeEngine()
    engine.add("turn 1", range(10), max_tokens=14)
    engine.run()
    history = [*range(10), *engine.tokens["turn 1"]]
    engine.add("turn 2", [*history, 1, 2, 3])
    assert planned(engine) == {"turn 2": 27 - 20}  # 23 tokens have KV: five full blocks


def test_resetting_the_prefix_cache_forgets_content_and_disturbs_nobody():
    engine = FakeEngine()
    engine.add("a", range(20))
    engine.step()
    engine.scheduler.reset_prefix_cache()
    engine.add("b", range(20))
    assert planned(engine) == {"a": 1, "b": 20}
    engine.run()
    assert_expected(engine, {"a": range(20), "b": range(20)}, 8)


@DEPTHS
def test_abort_frees_everything_at_once_and_late_results_go_nowhere(depth):
    engine = FakeEngine(depth=depth)
    engine.add("gone", range(20), max_tokens=50)
    engine.add("stays", range(30, 50), max_tokens=10)
    for _ in range(3):
        engine.step()
    engine.abort("gone")
    engine.add("next", range(60, 70), max_tokens=10)  # takes the row while results are in flight
    engine.run()
    assert_expected(engine, {"stays": range(30, 50), "next": range(60, 70)}, 10)
    assert engine.kv.pool.num_free == engine.kv.pool.num_blocks


def test_blocked_requests_are_passed_over():
    engine = FakeEngine()
    engine.add("grammar", range(5))
    engine.scheduler.block_for_grammar("grammar")
    engine.add("free", range(10, 15))
    for _ in range(20):
        engine.step()
    assert engine.order == ["free"]
    engine.scheduler.grammar_ready("grammar")
    engine.run()
    assert engine.order == ["free", "grammar"]


def test_an_aborted_request_no_longer_waits_for_its_grammar():
    engine = FakeEngine()
    engine.add("grammar", range(5))
    engine.scheduler.block_for_grammar("grammar")
    assert engine.scheduler.stats().num_waiting == 1
    engine.abort("grammar")
    assert engine.scheduler.stats().num_waiting == 0 and not engine.scheduler.has_unfinished()
    engine.scheduler.grammar_ready("grammar")  # its compile was under way
    assert engine.plan() is None


@DEPTHS
@pytest.mark.parametrize("window", [1, 4, 5, 6, 9])
def test_blocks_are_held_exactly_as_long_as_the_window_reaches_them(depth, window):
    engine = FakeEngine(specs=[spec(4), spec(4, window)], depth=depth, max_num_batched_tokens=7)
    engine.add("a", range(30), max_tokens=20)
    seen = 0
    while engine.scheduler.has_unfinished():
        running = engine.scheduler.running
        (row,) = running.order if len(running) else (None,)
        if row is not None:
            next_query = min(int(running.num_computed[row]), int(running.num_tokens[row]) - 1)
            first = max(0, next_query - window + 1) // 4
            plan = engine.plan()
            held = [block.id > 0 for block in engine.scheduler.requests["a"].blocks[1]]
            assert held == [False] * first + [True] * (len(held) - first)
            seen = max(seen, first)
            if plan is not None and len(engine.in_flight) <= depth:
                continue
        engine.step()
    assert seen >= 8
    assert_expected(engine, {"a": range(30)}, 20)


@DEPTHS
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [2, 8, 11, 16])
def test_forks_share_the_prompt_and_go_their_own_ways(depth, caching, length):
    engine = FakeEngine(depth=depth, caching=caching, specs=[spec(4), spec(4, 6)])
    prompt = range(length)
    for i in range(4):
        engine.add(f"r{i}", prompt, seed=i, fork_of="r0" if i else None)
    assert planned(engine) == {"r0": length}
    assert planned(engine) == {"r0": 1, "r1": 1, "r2": 1, "r3": 1}
    shared = [block.ref for block in engine.scheduler.requests["r0"].blocks[0]]
    assert shared[: (length - 1) // 4] == [4] * ((length - 1) // 4)
    while engine.scheduler.has_unfinished() or engine.in_flight:
        engine.check_books()
        engine.step()
    assert_expected(engine, dict.fromkeys(("r0", "r1", "r2", "r3"), prompt), 8, r1=1, r2=2, r3=3)
    assert len({tuple(t) for t in engine.tokens.values()}) == 4


def test_siblings_of_an_aborted_first_run_by_themselves():
    engine = FakeEngine()
    engine.add("first", range(100), max_tokens=5)
    engine.add("second", range(100), seed=1, fork_of="first")
    engine.plan()
    engine.abort("first")
    engine.run()
    assert_expected(engine, {"second": range(100)}, 8, second=1)


@DEPTHS
def test_a_failed_step_ends_its_requests_and_only_those(depth):
    engine = FakeEngine(depth=depth, max_num_batched_tokens=16)
    engine.add("fails", range(12))
    engine.plan()
    engine.add("shares", [*range(8), 70, 71])  # hits blocks that the failing step should have written
    if depth:
        engine.plan()
    plan, _ = engine.in_flight.popleft()
    outputs = engine.scheduler.fail_plan(plan, "out of memory")
    assert outputs.finish.tolist() == [FinishReason.ERROR] and outputs.errors == {0: "out of memory"}
    assert engine.names[int(outputs.index[0])] == "fails"
    engine.worker.cache[:] = -1  # what the failed step wrote is worth nothing
    engine.run()
    assert_expected(engine, {"shares": [*range(8), 70, 71]}, 8)
    engine.check_books()


def test_a_row_without_a_token_is_forgotten_by_the_prefix_cache():
    """Its logits were no numbers, so its keys and values may be none either."""
    engine = FakeEngine()
    engine.add("nan", range(20))
    engine.add("beside", range(60, 65))
    engine.plan()
    plan, output = engine.in_flight.popleft()
    output.token_ids[0, 0] = -1
    outputs = engine.scheduler.update_from_output(plan, output)
    failed = [engine.names[int(i)] for i, end in zip(outputs.index, outputs.finish, strict=True) if end]
    assert failed == ["nan"] and "nan" not in engine.scheduler.requests
    assert engine.kv.pool.num_cached == 0
    engine.add("same prompt", range(20))
    assert planned(engine) == {"beside": 1, "same prompt": 20}


def test_duplicate_ids_are_refused():
    engine = FakeEngine()
    engine.add("a", range(5))
    with pytest.raises(ValueError, match="in use"):
        engine.add("a", range(5))


def test_common_prefix_of_the_running_set_is_in_the_plan():
    engine = FakeEngine()
    engine.add("a", range(20))
    engine.add("b", [*range(16), 40, 41])
    assert engine.plan().common_prefix_blocks == (4,)
    engine.land()
    engine.add("c", range(60, 70))
    assert engine.plan().common_prefix_blocks == (0,)


def test_plans_name_only_what_changed():
    engine = FakeEngine(specs=[spec(4)])
    engine.add("a", range(6), max_tokens=20)
    first = engine.plan()
    assert [new.request_id for new in first.new_rows] == ["a"] and not first.appended.rows
    engine.land()
    for _ in range(2):
        plan = engine.plan()
        assert not plan.new_rows and not plan.appended.rows and plan.num_tokens.tolist() == [1]
        engine.land()
    plan = engine.plan()  # position 8 opens the third block
    assert not plan.new_rows and plan.appended.positions == [2]


def test_a_threshold_does_not_hold_up_prompts_that_may_not_be_cut():
    engine = FakeEngine(max_num_batched_tokens=64, long_prefill_token_threshold=8, chunked_prefill=False)
    engine.add("a", range(30))
    assert planned(engine) == {"a": 30}


def test_nobody_takes_the_blocks_of_a_preempted_request_while_its_plans_are_in_flight():
    engine = FakeEngine(num_blocks=8, depth=2, max_model_len=32)
    engine.add("a", range(8), max_tokens=20)
    engine.add("b", range(20, 30), max_tokens=12)
    while not engine.scheduler.num_preemptions:
        engine.step()
    engine.add("c", range(40, 44), max_tokens=4)
    admitted = []
    while engine.scheduler.has_unfinished():
        plan = engine.plan()
        admitted += [new.request_id for new in plan.new_rows] if plan is not None else []
        if plan is None or len(engine.in_flight) > 2:
            engine.land()
    assert admitted[0] == "b" and "c" in admitted


class Loader(KVConnector):
    """A connector that has every prompt's first tokens elsewhere and needs a while to bring them."""

    def __init__(self, num_tokens):
        self.num_tokens = num_tokens
        self.finished = []

    def get_num_new_matched_tokens(self, request, num_computed):
        return self.num_tokens - num_computed, True

    def request_finished(self, request, block_ids):
        self.finished.append((request.request_id, request.num_computed))
        return False


def loaded(engine, *names):
    """The step in which the connector reports these as brought."""
    plan, output = engine.in_flight.popleft()
    output.transfers = (FinishedTransfers(received=names),)
    engine.scheduler.update_from_output(plan, output)


def test_loaded_requests_that_wait_do_not_block_one_another_for_ever():
    engine = FakeEngine(num_blocks=10, policy="priority", connector=Loader(28), max_num_batched_tokens=64)
    engine.add("low", range(39), priority=1)
    engine.plan()
    loaded(engine, "low")
    engine.scheduler.transfers.connectors[0].num_tokens = 0
    engine.add("high", range(50, 70), priority=0)  # needs 5 blocks, and 3 are free
    plan = engine.plan()
    assert [new.request_id for new in plan.new_rows] == ["high"]
    engine.check_books()


def test_blocks_that_are_being_loaded_are_kept_after_an_abort():
    engine = FakeEngine(connector=Loader(16))
    engine.add("a", range(20))
    engine.plan()
    engine.abort("a")
    assert engine.kv.pool.num_free == engine.kv.pool.num_blocks - 4
    loaded(engine, "a")
    assert engine.kv.pool.num_free == engine.kv.pool.num_blocks
    assert engine.scheduler.transfers.connectors[0].finished == [("a", 16)]


def test_only_plans_with_tokens_are_counted_as_steps():
    engine = FakeEngine(connector=Loader(16))
    engine.add("a", range(20))
    plans = [engine.plan() for _ in range(2)]
    assert not any(len(plan.rows) for plan in plans if plan is not None)
    assert sum(engine.scheduler.stats().step_tokens) == 0
    loaded(engine, "a")
    assert len(engine.scheduler.schedule().rows) == 1
    stats = engine.scheduler.stats()
    assert sum(stats.step_tokens) == 1 and stats.step_tokens_sum == 5  # 4 of the prompt, 1 generated


@DEPTHS
@pytest.mark.parametrize("specs", [[spec(4), state_spec(4)], [state_spec(8)]])
def test_a_state_is_shared_only_with_later_plans(specs, depth):
    engine = FakeEngine(specs=specs, depth=depth)
    prompts = {name: range(20) for name in "abc"}
    for name in "ab":
        engine.add(name, prompts[name], max_tokens=9)
    assert planned(engine) == {"a": 20, "b": 20}
    engine.add("c", prompts["c"], max_tokens=9)
    assert planned(engine)["c"] == 4  # whatever is in flight
    engine.run()
    assert_expected(engine, prompts, 9)


def test_a_request_that_ends_while_preempted_has_no_blocks_to_save():
    engine = FakeEngine(num_blocks=8, connector=Loader(0))
    engine.add("a", range(12), max_tokens=12)
    engine.add("b", range(20, 32), max_tokens=12)
    while not engine.scheduler.num_preemptions:
        engine.step()
    engine.abort("b")
    assert engine.scheduler.transfers.connectors[0].finished == [("b", 0)]
