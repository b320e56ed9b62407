"""Whatever arrives, whenever, with however little memory: the books balance and outputs depend on the request alone."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.core.kv_layout import blocks_of_one_request
from quire.messages.kv_cache import KVCacheGroup
from quire.messages.pooling_params import PoolingParams
from quire.messages.requests import FinishReason
from quire.messages.speculation import DraftProfile
from quire.messages.structured import StructuredOutputsParams
from tests.core.fake_engine import (
    MOST_DRAFTS,
    PROPOSERS,
    FakeEngine,
    expected_pooled,
    expected_tokens,
    spec,
    state_spec,
)
from tests.properties import examples

MAX_LEN = 40
LAYOUTS = [
    [spec(4)],
    [spec(1)],
    [spec(4), spec(4, 6)],
    [spec(4, 5)],
    [spec(2), spec(4, 9), spec(4, 3)],
    [state_spec(4)],
    [spec(2), state_spec(4), spec(4, 3)],
]


@st.composite
def workloads(draw):
    specs = draw(st.sampled_from(LAYOUTS))
    prefix = draw(st.lists(st.integers(0, 9), min_size=1, max_size=12))
    requests = []
    for _ in range(draw(st.integers(1, 9))):
        own = draw(st.lists(st.integers(0, 9), max_size=14))
        prompt = (prefix if draw(st.booleans()) else []) + own or [3]
        pools = draw(st.sampled_from([None, None, None, "a prefix may be cached", "the whole prompt"]))
        if pools and draw(st.booleans()):
            prompt = (prompt * MAX_LEN)[:MAX_LEN]  # no room for a token more
        requests.append(
            {
                "prompt": prompt,
                "max_tokens": draw(st.integers(1, 14)),
                "seed": draw(st.integers(0, 3)),
                "priority": draw(st.integers(0, 2)),
                "forks": 0 if pools else draw(st.sampled_from([0, 0, 0, 1, 2])),
                "pools": pools,
                "arrives": draw(st.integers(0, 12)),
                "aborts": draw(st.one_of(st.none(), st.none(), st.integers(1, 15))),
                "stop": draw(st.sampled_from([(), (), tuple(range(0, 50, 7))])),
                "grammar": draw(st.sampled_from([None, None, StructuredOutputsParams(regex="any")])),
                "resumed": draw(st.sampled_from([0, 0, 0, 1, 3, 6])),
                "salt": draw(st.sampled_from([None, None, "s"])),
            }
        )
    depth, budget = draw(st.integers(0, 4)), draw(st.integers(1, 24))
    groups = tuple(KVCacheGroup((i,), s) for i, s in enumerate(specs))
    # A state that has advanced by a rejected draft cannot go back.
    num_drafts = draw(st.integers(0, MOST_DRAFTS)) if all(s.rolls_back for s in specs) else 0
    span = max(budget, (depth + 1) * (1 + num_drafts) + 1)
    smallest = blocks_of_one_request(groups, MAX_LEN, span)  # what start-up insists on
    engine = {
        "specs": specs,
        "num_blocks": smallest + draw(st.integers(0, 12)),
        "depth": depth,
        "max_model_len": MAX_LEN,
        "caching": draw(st.booleans()),
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_num_batched_tokens": budget,
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 3])),
        "num_drafts": num_drafts,
        "num_stages": 1 if num_drafts else draw(st.sampled_from([1, 1, depth + 1])),
        "adaptive_drafts": draw(st.booleans()),
        "draft_profile": DraftProfile(
            finds=draw(st.booleans()), rests=draw(st.booleans()), sizes=draw(st.sampled_from([(), (num_drafts,)]))
        ),
        "proposer": draw(st.sampled_from(sorted(PROPOSERS))),
    }
    return engine, requests


def elsewhere(request):
    """What another engine has generated of it already."""
    tokens = expected_tokens(request["prompt"], request["max_tokens"], request["seed"], request["stop"], MAX_LEN)
    if request["forks"] or request["pools"] or len(tokens) <= request["resumed"]:
        return []
    return tokens[: request["resumed"]]


@settings(max_examples=examples(400), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(workloads())
def test_books_balance_and_outputs_do_not_depend_on_the_schedule(workload):
    options, requests = workload
    serve_and_check(FakeEngine(**options), requests)


def serve_and_check(engine, requests, after_step=lambda: None):
    """All requests, each when it arrives: every output is the request's own, and in the end nothing is held."""
    names = {}
    for i, r in enumerate(requests):
        for fork in range(r["forks"] + 1):
            names[f"{i}.{fork}"] = (r, r["seed"] + fork)
    clock = 0
    while clock <= 12 or engine.scheduler.has_unfinished() or engine.in_flight:
        for i, r in enumerate(requests):
            for fork in range(r["forks"] + 1):
                name = f"{i}.{fork}"
                if r["arrives"] == clock:
                    engine.add(
                        name, r["prompt"], r["max_tokens"], r["seed"] + fork, r["priority"],
                        fork_of=f"{i}.0" if fork else None, salt=r["salt"], stop=r["stop"],
                        structured_outputs=r["grammar"], output=elsewhere(r),
                        pooling=PoolingParams(skip_reading_prefix_cache=r["pools"] == "the whole prompt")
                        if r["pools"] else None,
                    )  # fmt: skip
                if r["aborts"] is not None and r["arrives"] + r["aborts"] == clock and fork == 0:
                    engine.abort(name)
        engine.step()
        engine.check_books()
        after_step()
        clock += 1
        assert clock < 3000, "a request starves"
    for name, (r, seed) in names.items():
        if r["pools"]:
            assert not engine.tokens[name]
            if engine.finish[name] != FinishReason.ABORT:
                assert engine.finish[name] == FinishReason.STOP
                assert engine.pooled[name] == expected_pooled(r["prompt"], r["pools"] == "the whole prompt")
            continue
        expected = expected_tokens(r["prompt"], r["max_tokens"], seed, r["stop"], MAX_LEN)
        expected = expected[len(elsewhere(r)) :]
        if engine.finish[name] == FinishReason.ABORT:
            expected = expected[: len(engine.tokens[name])]
        assert engine.tokens[name] == expected
    assert engine.worker.max_tokens_seen <= engine.scheduler.max_num_batched_tokens
    assert engine.kv.pool.num_free == engine.kv.pool.num_blocks
