"""What watchers of the engine see: lengths, numbers and counts."""

import numpy as np
import pytest

from quire.core import view as view_module
from quire.core.view import EngineView
from tests.core.fake_engine import FakeEngine

HELD, FINDABLE = 3, 4  # bits of a block's state


def states(sample: dict) -> list[int]:
    return list(sample["blocks"]["states"])


def watched(engine: FakeEngine, view: EngineView, steps: int) -> None:
    """As `EngineCore.step` does, but for asynchrony."""
    for _ in range(steps):
        plan = engine.scheduler.schedule()
        assert plan is not None
        output = engine.worker.run(plan)
        view.after_step(plan, 0.25)
        engine.scheduler.update_from_output(plan, output)


def test_requests_are_shown_by_their_lengths() -> None:
    engine = FakeEngine()
    engine.add("secret-name", range(20), max_tokens=30)
    engine.add("other", range(100, 110), max_tokens=5)
    engine.step()
    sample = EngineView(engine.scheduler).sample(0, ())
    ids, prompts, computed, tokens, limits, _ = zip(*sample["running"], strict=True)
    assert ids == (1, 2) and prompts == (20, 10) and limits == (50, 15)
    assert tokens == (21, 11) and all(c >= p for c, p in zip(computed, prompts, strict=True))
    assert "secret" not in repr(sample)


def test_waiting_requests_are_in_the_order_of_admission() -> None:
    engine = FakeEngine()
    for name in "abc":
        engine.add(name, range(20))
    sample = EngineView(engine.scheduler).sample(0, ())
    assert [(id, prompt, state) for id, prompt, _, state in sample["waiting"]] == [(1, 20, 0), (2, 20, 0), (3, 20, 0)]
    assert sample["running"] == []


def test_a_block_is_free_held_findable_or_shared() -> None:
    engine = FakeEngine()
    view = EngineView(engine.scheduler)
    assert not any(state & (HELD | FINDABLE) for state in states(view.sample(0, ())))
    engine.add("a", range(40), max_tokens=20)
    engine.step()
    once = states(view.sample(0, ()))
    assert sum(state & HELD == 1 for state in once) == 10  # of 4 tokens each
    assert sum(bool(state & FINDABLE) for state in once) == 10
    engine.add("b", range(40), max_tokens=20)
    engine.step()
    assert sum(state & HELD == 2 for state in states(view.sample(0, ()))) == 9  # but for the last token's
    engine.run()
    end = states(view.sample(0, ()))
    assert not any(state & HELD for state in end) and any(state & FINDABLE for state in end)


def test_steps_tell_prompts_from_generated_tokens() -> None:
    engine = FakeEngine()
    view = EngineView(engine.scheduler)
    engine.add("a", range(20), max_tokens=4)
    watched(engine, view, 2)
    steps = view.sample(0, ())["steps"]
    assert [(prefill, decode, rows) for _, _, _, prefill, decode, _, rows in steps] == [(20, 0, 1), (0, 1, 1)]
    assert [step[2] for step in steps] == [0.25, 0.25]
    assert view.sample(steps[0][0], ())["steps"] == steps[1:]


def test_steps_are_not_noted_when_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    view = EngineView(engine.scheduler)
    engine.add("a", range(20), max_tokens=4)
    plan = engine.scheduler.schedule()
    assert plan is not None and view.after_step(plan, 0.1) is view
    monkeypatch.setattr(view_module, "WATCH_SECONDS", -1.0)
    assert view.after_step(plan, 0.1) is None


def test_a_large_cache_is_shown_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    engine.add("a", range(40), max_tokens=20)
    engine.step()
    whole = states(EngineView(engine.scheduler).sample(0, ()))
    monkeypatch.setattr(view_module, "MAX_BLOCKS", 7)
    view = EngineView(engine.scheduler)
    # Two API processes that watch in turn, the second less often: each sees all of it.
    for often in (1, 3):
        seen, cursor = np.zeros(len(whole), np.uint8), ()
        for _ in range(-(-len(whole) // 7)):
            blocks = view.sample(0, cursor)["blocks"]
            for _ in range(often):
                view.sample(0, ())
            cursor, part = blocks["cursor"], np.frombuffer(blocks["states"], np.uint8)
            assert 0 < len(part) <= 7
            seen[blocks["first"] : blocks["first"] + len(part)] = part
        assert seen.tolist() == whole
        # From then on only as far as blocks have ever been used.
        again = view.sample(0, cursor)["blocks"]
        assert again["first"] == 0 and again["cursor"][1] == 10
