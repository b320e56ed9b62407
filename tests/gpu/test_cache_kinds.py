"""Layers of different kinds of cache on a GPU: Triton, torch and a backend of a test's own in one model."""

import pytest

from tests.cache_kinds.test_mixed_model import FEW_BLOCKS, assert_equal, engine, folder, generate, worker_of

pytestmark = pytest.mark.gpu
__all__ = ["folder"]

SETTINGS = {"batched": {}, "chunks of 24": {"max_num_batched_tokens": 24}, "preempted": FEW_BLOCKS}


@pytest.mark.parametrize("setting", SETTINGS)
def test_equal_to_the_reference(folder, setting):
    with engine(folder, dtype="float32", **SETTINGS[setting]) as llm:
        runner = worker_of(llm).runner
        assert {backend.name for backend in runner.backends.distinct} >= {"triton", "latent-torch", "scan-torch"}
        assert runner.graphs is None
        for _ in range(2):  # the second time from the cache
            assert_equal(llm, generate(llm), tolerance=0.02)
        assert (llm.llm_engine.stats.num_preemptions > 0) == ("preempted" in setting)
