"""Drafts of rows under a grammar: the host makes their masks once it knows what they are."""

import pytest

from quire.messages.structured import StructuredOutputsParams
from tests.core.fake_engine import FakeEngine, expected_tokens

GRAMMAR = StructuredOutputsParams(regex="any")
PROMPT = [3, 1, 4, 1, 5]


@pytest.mark.parametrize("proposer", ["random", "half right", "right"])
@pytest.mark.parametrize("depth", [0, 1, 4])
def test_the_host_knows_the_drafts_that_are_verified(depth, proposer):
    """Otherwise the engine asserts."""
    engine = FakeEngine(depth=depth, num_drafts=3, proposer=proposer)
    for seed in range(4):
        engine.add(f"free {seed}", PROMPT, 12, seed)
        engine.add(f"constrained {seed}", PROMPT, 12, seed, structured_outputs=GRAMMAR)
    engine.run()
    for name, tokens in engine.tokens.items():
        assert tokens == expected_tokens(PROMPT, 12, int(name[-1]))
    assert engine.worker.num_accepted > 0


def test_masks_wait_for_drafts_in_flight():
    """A request that another engine began has a token left after a chunk: its drafts come with the chunk's results."""
    output = expected_tokens(PROMPT, 4)
    engine = FakeEngine(depth=1, num_drafts=2, proposer="right", max_num_batched_tokens=8)
    engine.add("a", PROMPT, 12, output=output, structured_outputs=GRAMMAR)
    chunk, decode = engine.plan(), engine.plan()
    assert (chunk.num_tokens.tolist(), decode.num_tokens.tolist()) == ([8], [3])
    assert engine.scheduler.constrained_rows(decode) is None
    engine.land()
    found = engine.scheduler.constrained_rows(decode)
    assert found.rows == [(0, 0)] and found.drafts == {0: expected_tokens(PROMPT, 6)[4:]}
    engine.run()
    assert engine.tokens["a"] == expected_tokens(PROMPT, 12)[4:]
