"""Prompts with features, in any schedule: each is encoded before it is read, and kept as long as it is needed."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.core.kv_layout import blocks_of_one_request
from quire.features.encoder_cache import EncoderCache
from quire.messages.features import EMBEDS, Feature
from quire.messages.kv_cache import KVCacheGroup
from quire.messages.plan import SchedulerOutput
from quire.messages.requests import ErrorKind, FinishReason, RequestError
from tests.core.fake_engine import FakeEngine, FakeWorker, expected_tokens, spec
from tests.properties import examples

MAX_LEN = 40


def feature(start, length, content, kind="image"):
    """What its tokens stand for: numbers that no token id has."""
    data = np.arange(length) + 1000 * content
    return Feature(kind, start, length, data, f"{kind} {content} {length}".encode())


def effective(prompt, features):
    """What a model would see of the prompt."""
    seen = np.array(prompt)
    for each in features:
        seen[each.start : each.stop] = each.data
    return seen


class FeatureWorker(FakeWorker):
    """Reads a feature's tokens from what it has encoded."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.encoded: dict[bytes, np.ndarray] = {}
        self.num_encoded = 0
        self.most_tokens = 0
        self.features: dict[int, tuple[Feature, ...]] = {}

    def run(self, plan: SchedulerOutput):
        for row in plan.finished_rows:
            self.features.pop(row, None)
        for new in plan.new_rows:
            if new.features:
                self.features[new.row] = new.features
        new_rows = [replace(new, token_ids=effective(new.token_ids, new.features)) for new in plan.new_rows]
        computed = {row: state["computed"] for row, state in self.rows.items()}
        computed |= {new.row: new.num_computed for new in plan.new_rows}
        chunks = {}
        if plan.features is not None:
            for key in plan.features.free:
                self.encoded.pop(key)
            for row, index in plan.features.encode:
                one = self.features[row][index]
                assert one.content_hash not in self.encoded, "encoded twice"
                self.encoded[one.content_hash] = one.data
                self.num_encoded += 1
            self.most_tokens = max(self.most_tokens, sum(map(len, self.encoded.values())))
            chunks = {chunk.row: chunk for chunk in plan.features.chunks}
        for place, (row, count) in enumerate(zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True)):
            start, stop = computed[row], computed[row] + count
            touched = [f for f in self.features.get(row, ()) if f.start < stop and start < f.stop]
            if touched:
                chunk = chunks[row]
                assert (chunk.place, chunk.start, chunk.stop) == (place, start, stop)
            assert all(np.array_equal(self.encoded[f.content_hash], f.data) for f in touched if f.kind != EMBEDS)
        return super().run(replace(plan, new_rows=new_rows))


def fake_engine(**options) -> FakeEngine:
    engine = FakeEngine(**options)
    engine.worker.__class__ = FeatureWorker
    worker = engine.worker
    worker.encoded, worker.features, worker.num_encoded, worker.most_tokens = {}, {}, 0, 0
    return engine


def check_features(engine) -> None:
    """Owners are those that hold it; core and worker agree on what is there."""
    features = engine.scheduler.features
    cache = features.cache
    held = [key for request in features._held.values() for key in request.values()]
    assert {key: held.count(key) for key in cache.lengths} == cache.owners
    assert cache.num_tokens == sum(cache.lengths.values()) <= cache.capacity
    assert set(engine.worker.encoded) == set(cache.lengths) | set(cache.evicted)
    assert all(request.row >= 0 for request in features.active)


@st.composite
def prompts_with_features(draw):
    prompt = draw(st.lists(st.integers(0, 9), min_size=1, max_size=24))
    features, at = [], 0
    while at < len(prompt) and len(features) < 3:
        start = draw(st.integers(at, len(prompt) - 1))
        length = draw(st.integers(1, min(8, len(prompt) - start)))
        kind = draw(st.sampled_from(["image", "image", EMBEDS]))
        features.append(feature(start, length, draw(st.integers(1, 3)), kind))
        prompt[start : start + length] = [5] * length
        at = start + length
    return prompt, tuple(features[: draw(st.integers(0, 3))])


@st.composite
def workloads(draw):
    requests = []
    for _ in range(draw(st.integers(1, 8))):
        prompt, features = draw(prompts_with_features())
        requests.append(
            {
                "prompt": prompt,
                "features": features,
                "max_tokens": draw(st.integers(1, 12)),
                "forks": draw(st.sampled_from([0, 0, 1, 2])),
                "arrives": draw(st.integers(0, 10)),
                "aborts": draw(st.one_of(st.none(), st.none(), st.integers(1, 12))),
            }
        )
    specs = draw(st.sampled_from([[spec(4)], [spec(1)], [spec(4), spec(4, 6)]]))
    depth, budget, num_drafts = draw(st.integers(0, 3)), draw(st.integers(1, 24)), draw(st.sampled_from([0, 2]))
    groups = tuple(KVCacheGroup((i,), s) for i, s in enumerate(specs))
    span = max(budget, (depth + 1) * (1 + num_drafts) + 1)
    options = {
        "specs": specs,
        "num_blocks": blocks_of_one_request(groups, MAX_LEN, span) + draw(st.integers(0, 8)),
        "depth": depth,
        "max_model_len": MAX_LEN,
        "caching": draw(st.booleans()),
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_num_batched_tokens": budget,
        "num_drafts": num_drafts,
        "encoder_cache_tokens": draw(st.integers(8, 30)),
    }
    return options, requests


@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(workloads())
def test_books_balance_and_outputs_do_not_depend_on_the_schedule(workload):
    options, requests = workload
    engine = fake_engine(**options)
    clock = 0
    while clock <= 10 or engine.scheduler.has_unfinished() or engine.in_flight:
        for i, r in enumerate(requests):
            for fork in range(r["forks"] + 1) if r["arrives"] == clock else ():
                parent = f"{i}.0" if fork else None
                engine.add(f"{i}.{fork}", r["prompt"], r["max_tokens"], fork, fork_of=parent, features=r["features"])
            if r["aborts"] is not None and r["arrives"] + r["aborts"] == clock:
                engine.abort(f"{i}.0")
        engine.step()
        engine.check_books()
        check_features(engine)
        clock += 1
        assert clock < 3000, "a request starves"
    for i, r in enumerate(requests):
        for fork in range(r["forks"] + 1):
            name = f"{i}.{fork}"
            expected = expected_tokens(effective(r["prompt"], r["features"]), r["max_tokens"], fork, (), MAX_LEN)
            if engine.finish[name] == FinishReason.ABORT:
                expected = expected[: len(engine.tokens[name])]
            assert engine.tokens[name] == expected
    assert engine.worker.most_tokens <= options["encoder_cache_tokens"]
    assert not engine.scheduler.features.active and not any(engine.scheduler.features.cache.owners.values())


def test_equal_content_is_encoded_once():
    engine = fake_engine(caching=False)
    for name in "abc":
        engine.add(name, [1, 2, 5, 5, 5, 3], features=(feature(2, 3, 1),))
    engine.run()
    engine.add("later", [5, 5, 5, 5], features=(feature(0, 3, 1),))
    engine.run()
    assert engine.worker.num_encoded == 1 and len(set(map(tuple, engine.tokens.values()))) == 2


def test_text_makes_no_plan_about_features():
    engine = fake_engine()
    engine.add("text", [1, 2, 3])
    assert engine.plan().features is None
    engine.add("features", [1, 5, 3], max_tokens=3, features=(feature(1, 1, 1),))
    assert engine.plan().features.encode
    assert engine.plan().features is None  # its prompt is computed


def test_room_is_made_of_what_is_not_in_use():
    cache = EncoderCache(capacity=10, step_tokens=100)
    assert cache.acquire(b"a", 4) and cache.acquire(b"b", 4) and not cache.acquire(b"c", 4)
    assert cache.begin_encoding(b"a") and cache.begin_encoding(b"b") and not cache.begin_encoding(b"a")
    cache.release(b"a")
    assert cache.acquire(b"c", 4) and cache.end_plan() == [b"a"]
    assert cache.acquire(b"b", 4)  # a second owner
    cache.release(b"b")
    assert not cache.acquire(b"a", 4)
    cache.release(b"c")  # no plan has encoded it
    assert cache.end_plan() == [] and cache.num_tokens == 4


def test_a_step_encodes_within_a_budget_or_one_alone():
    cache = EncoderCache(capacity=100, step_tokens=10)
    assert cache.acquire(b"long", 50) and not cache.acquire(b"a", 1)
    cache.end_plan()
    assert cache.acquire(b"a", 6) and cache.acquire(b"b", 4) and not cache.acquire(b"c", 1)


@pytest.mark.parametrize("depth", [0, 2])
def test_after_a_failed_step_features_are_encoded_again(depth):
    engine = fake_engine(depth=depth, max_num_batched_tokens=4, encoder_cache_tokens=5)
    engine.add("a", [1, 5, 5, 5, 5, 5, 2], features=(feature(1, 5, 1),))
    engine.add("b", [1, 5, 5, 5, 5, 5, 2, 3], features=(feature(1, 5, 1),), seed=1)
    first = engine.plan()
    later = [engine.plan() for _ in range(depth)]
    engine.in_flight.clear()
    engine.scheduler.fail_plan(first, RequestError(ErrorKind.INTERNAL, "it broke"))
    for plan in later:
        if plan is not None:
            engine.scheduler.fail_plan(plan, RequestError(ErrorKind.INTERNAL, "it broke"))
    engine.run()
    check_features(engine)
    features = (feature(1, 5, 1),)
    assert engine.tokens["b"] == expected_tokens(effective([1, 5, 5, 5, 5, 5, 2, 3], features), 8, 1)
    assert engine.worker.num_encoded == 2
