"""How many drafts rows get: by what was found, what was accepted, and what a step costs."""

import numpy as np
import pytest

from quire.messages.speculation import DraftProfile
from quire.messages.structured import StructuredOutputsParams
from quire.spec_decode.draft_planner import (
    FIRST_TRIAL,
    LOOK,
    PATIENCE,
    PLAIN_EVERY,
    PROBE_ROW,
    PROBE_STEP,
    TRIAL,
    DraftPlanner,
)
from tests.core.fake_engine import FakeEngine, expected_tokens

FLAT = ((1, 1.0), (1000, 1.0))  # a step takes as long with any number of tokens
LINEAR = ((1, 1.0), (1000, 1000.0))  # no token comes free
PROMPT = [3, 1, 4, 1, 5]
GRAMMAR = StructuredOutputsParams(regex="any")


def planner(num_rows: int = 4, seconds=FLAT, adaptive=True, **profile) -> DraftPlanner:
    made = DraftPlanner(num_rows, 4, 256, adaptive, DraftProfile(plain=seconds, **profile))
    made.add_rows(list(range(num_rows)))
    return made


def decode(made: DraftPlanner, rows=(0, 1, 2, 3), room=4) -> list[int] | None:
    """What a step gets in which all rows decode."""
    n = len(rows)
    if made.goes_on_resting():
        return None
    found = made.plan(np.array(rows), np.ones(n, np.int64), np.ones(n, bool), np.full(n, room), 256)
    return None if found is None else found.tolist()


def accept(made: DraftPlanner, row: int, accepted: int, drafts: int = 4, times: int = 1) -> None:
    for _ in range(times):
        made.observe(np.array([row]), np.array([drafts]), np.array([accepted]))


def test_a_fixed_number() -> None:
    made = planner(adaptive=False)
    accept(made, 0, 0, times=100)
    assert decode(made) == [4, 4, 4, 4]
    assert decode(made, room=2) == [2, 2, 2, 2]


def test_rows_follow_their_acceptance() -> None:
    made = planner(seconds=((1, 1.0), (4, 1.0), (256, 30.0)))
    accept(made, 0, 4, times=50)
    accept(made, 1, 1, times=50)
    accept(made, 2, 0, times=50)
    first, second, third, fourth = decode(made)
    assert first == 4 and third == 0
    assert 0 < second < 4 and 0 < fourth <= 4


def test_tokens_that_cost_nothing_are_all_drafted() -> None:
    assert decode(planner()) == [4, 4, 4, 4]


def test_a_row_without_acceptance_is_probed_now_and_then() -> None:
    made = planner(seconds=((1, 1.0), (2, 1.1), (256, 30.0)))
    accept(made, 0, 0, times=100)
    planned = [decode(made, rows=[0])[0] for _ in range(3 * (PROBE_ROW + 1))]
    assert sum(planned) == 3 and max(planned) == 1
    accept(made, 0, 1, drafts=1)
    assert decode(made, rows=[0]) == [1], "a probe that was right is followed by another"


def test_a_row_whose_drafts_become_right_gets_them_again() -> None:
    made = planner(seconds=((1, 1.0), (2, 1.1), (256, 30.0)))
    accept(made, 0, 0, times=100)
    for _ in range(200):
        if count := decode(made, rows=[0])[0]:
            accept(made, 0, count, drafts=count)
    assert decode(made, rows=[0]) == [4]


def test_new_requests_begin_with_the_acceptance_of_the_others() -> None:
    made = planner(seconds=((1, 1.0), (2, 1.2), (256, 30.0)))
    accept(made, 0, 0, times=500)
    made.add_rows([3])
    assert decode(made, rows=[3]) == [0]


def test_where_no_token_comes_free_there_are_no_drafts() -> None:
    assert decode(planner(seconds=LINEAR)) == [0, 0, 0, 0]
    assert decode(planner(seconds=LINEAR, rests=True)) is None, "the proposer rests"


def test_a_large_batch_suspends_drafts() -> None:
    made = planner(num_rows=64, seconds=((1, 1.0), (16, 1.05), (256, 16.0)))
    assert decode(made, rows=range(1)) == [4]
    assert decode(made, rows=range(64)) == [0] * 64


def test_rows_without_a_match_get_none() -> None:
    made = planner(finds=True)
    made.num_found[:] = [4, 0, 2, 0]
    assert decode(made) == [4, 0, 2, 0]


def test_a_proposer_that_finds_nothing_looks_less_often() -> None:
    made = planner(finds=True, rests=True)
    looked = [decode(made) is not None for _ in range(PATIENCE + 4 * LOOK)]
    assert all(looked[:PATIENCE]) and sum(looked[PATIENCE:]) == 4
    made.found(np.arange(4), np.array([0, 3, 0, 0]))
    assert decode(made) == [0, 3, 0, 0]


def test_a_few_drafts_may_pay_where_many_do_not() -> None:
    made = planner(seconds=((1, 1.0), (8, 1.0), (9, 40.0), (256, 50.0)))
    assert decode(made) == [1, 1, 1, 1]


def test_equal_rows_where_steps_are_captured() -> None:
    made = planner(sizes=(4,), finds=True)
    made.num_found[:] = [4, 4, 0, 4]
    assert decode(made) == [4, 4, 4, 4]
    assert decode(made, room=1) == [4, 4, 4, 4], "what is past the limit is not accepted"
    made.num_found[:] = 0
    assert decode(made) == [0, 0, 0, 0]
    prompt = made.plan(np.array([0, 1]), np.array([1, 7]), np.array([True, False]), np.array([4, 4]), 256)
    assert prompt.tolist() == [0, 0]


def test_equal_rows_are_probed_together() -> None:
    made = planner(sizes=(4,), seconds=((1, 1.0), (4, 1.0), (256, 30.0)))
    for row in range(4):
        accept(made, row, 0, times=100)
    planned = [decode(made) for _ in range(2 * (PROBE_STEP + 1))]
    assert planned.count([4] * 4) == 2 and planned.count([0] * 4) == 2 * PROBE_STEP


def run(made: DraftPlanner, num_plans: int, cost, load=lambda plan: 1.0) -> list[int]:
    """Drafts of each of so many plans of four rows, of which cost(tokens) says how long a step takes."""
    planned = []
    for i in range(num_plans):
        found = decode(made)
        drafts = sum(found or [])
        made.took(4, drafts, found is None, cost(4 + drafts) * load(i))
        if drafts:
            for row, count in enumerate(found):
                accept(made, row, count, drafts=count)
        if found is not None:
            made.found(np.arange(4), np.full(4, 4))
        planned.append(drafts)
    return planned


@pytest.mark.parametrize("profile", [{}, {"rests": True}, {"rests": True, "finds": True}, {"sizes": (4,)}], ids=str)
def test_a_disturbed_measurement_is_corrected(profile) -> None:
    """Steps take as long with any number of tokens, but those with drafts seemed to take ten times as long."""
    made = planner(drafted=((2, 10.0), (256, 10.0)), **profile)
    planned = run(made, 30 * FIRST_TRIAL, lambda tokens: 0.01, lambda i: 1 + i / 100)
    assert not any(planned[:FIRST_TRIAL])
    assert planned[-2 * TRIAL :].count(16) >= 2 * TRIAL - 2


def test_drafts_that_seemed_free_and_are_not() -> None:
    made = planner()
    planned = run(made, 8 * PLAIN_EVERY, lambda tokens: 0.01 * tokens**1.2, lambda i: 1 + i / 100)
    assert all(planned[:PLAIN_EVERY]) and np.count_nonzero(planned[-PLAIN_EVERY:]) < 4 * TRIAL


def test_drafts_that_do_not_pay_are_tried_ever_more_seldom() -> None:
    planned = run(planner(seconds=LINEAR), 4096, lambda tokens: 0.01 * tokens)
    tried = np.flatnonzero(planned)
    assert tried[0] == FIRST_TRIAL and len(tried) < 8 * TRIAL


def test_counts_of_what_was_accepted() -> None:
    made = planner()
    made.observe(np.array([0, 1, 2]), np.array([4, 0, 2]), np.array([3, 0, 0]))
    made.observe(np.array([0]), np.array([4]), np.array([4]))
    stats = made.stats
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 10, 7)
    assert stats.accepted_by_position == [2, 2, 2, 1]
    assert stats.since(stats).num_drafts == 0


PROFILES = {
    "free": DraftProfile(),
    "costs": DraftProfile(plain=((1, 1.0), (4, 1.0), (64, 6.0))),
    "found": DraftProfile(finds=True),
    "equal": DraftProfile(sizes=(3,)),
    "equal, found": DraftProfile(sizes=(3,), finds=True, plain=((1, 1.0), (16, 1.0), (64, 4.0))),
    "rests": DraftProfile(finds=True, rests=True, plain=((1, 1.0), (4, 1.0), (64, 6.0))),
    "none pays": DraftProfile(plain=LINEAR, finds=True, rests=True),
}


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("proposer", ["random", "half right", "right"])
@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_texts_do_not_depend_on_the_plan(profile: DraftProfile, proposer: str, depth: int) -> None:
    """Requests under a grammar among them, and with too few blocks for all."""
    engine = FakeEngine(
        depth=depth, num_blocks=24, num_drafts=3, proposer=proposer, adaptive_drafts=True, draft_profile=profile
    )
    for seed in range(6):
        engine.add(f"free {seed}", PROMPT, 20 + seed, seed)
        engine.add(f"constrained {seed}", PROMPT[:3], 20 + seed, seed, structured_outputs=GRAMMAR)
    engine.run()
    engine.check_books()
    assert engine.scheduler.num_preemptions > 0
    for name, tokens in engine.tokens.items():
        prompt = PROMPT if name.startswith("free") else PROMPT[:3]
        assert tokens == expected_tokens(prompt, 20 + int(name[-1]), int(name[-1]))
    stats = engine.scheduler.drafts.stats
    assert stats.num_drafts > 0 or profile.plain == LINEAR


def test_a_captured_step_has_equal_rows() -> None:
    engine = FakeEngine(
        depth=1, num_drafts=3, proposer="right", adaptive_drafts=True, draft_profile=DraftProfile(sizes=(3,))
    )
    for seed in range(3):
        engine.add(f"{seed}", PROMPT, 11, seed)
        engine.plan()
    engine.run()
    with_drafts = [plan for plan in engine.plans if plan.num_drafts.any()]
    assert with_drafts and all((plan.num_tokens == 4).all() for plan in with_drafts)
    assert all(tokens == expected_tokens(PROMPT, 11, int(name)) for name, tokens in engine.tokens.items())


def test_a_resting_proposer_is_not_called() -> None:
    engine = FakeEngine(num_drafts=3, adaptive_drafts=True, draft_profile=PROFILES["none pays"])
    engine.add("a", PROMPT, 5)
    engine.run()
    first, *rest = engine.plans
    assert first.num_drafts.tolist() == [0] and all(plan.num_drafts is None for plan in rest)


@pytest.mark.parametrize("adaptive", [False, True])
def test_no_row_waits_for_the_drafts_of_another(adaptive: bool) -> None:
    engine = FakeEngine(
        num_drafts=3, proposer="right", adaptive_drafts=adaptive, max_num_batched_tokens=10, max_num_seqs=8
    )
    for seed in range(4):
        engine.add(f"{seed}", PROMPT, 21, seed)
    engine.run()
    decoding = [plan for plan in engine.plans if (plan.num_tokens == 1 + plan.num_drafts).all()]
    counts = [len(plan.rows) for plan in decoding]
    assert counts[0] == 4 and decoding[0].num_drafts.sum() == 6, "those that there is room for"
    assert counts == sorted(counts, reverse=True), "rows leave when they are done"
    assert all(tokens == expected_tokens(PROMPT, 21, int(name)) for name, tokens in engine.tokens.items())
