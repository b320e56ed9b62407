"""Pooling on a GPU: vectors equal transformers', beside requests whose decode steps replay graphs, and from graphs."""

import numpy as np
import pytest
import torch

from quire import PoolingParams
from tests.gpu.test_engine import engine, greedy, tokens
from tests.pooling.references import assert_close, make_pooling_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DRAFTS = {"method": "tests.spec_decode.proposers:Fixed", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return make_pooling_reference("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 64}, {"enforce_eager": True}])
@pytest.mark.parametrize("pooling_type", ["LAST", "MEAN", "CLS"])
def test_equal_to_transformers(reference, pooling_type, options):
    with engine(reference.path, dtype="float32", max_model_len=256, **options) as llm:
        for _ in range(2):  # the second time from the cache, where that may be
            outputs = llm.encode(reference.prompts, PoolingParams(pooling_type=pooling_type), use_tqdm=False)
            assert_close(outputs, reference.vectors(pooling_type), 1e-3)
        full = reference.prompts[5]
    with engine(reference.path, dtype="float32", max_model_len=len(full), **options) as llm:
        (output,) = llm.encode([full], PoolingParams(pooling_type=pooling_type), use_tqdm=False)
        assert_close([output], [reference.vectors(pooling_type)[5]], 1e-3)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 64}, {"speculative_config": DRAFTS}])
def test_beside_requests_that_generate(reference, options):
    arguments = {"dtype": "float32", "max_model_len": 256, **options}
    with engine(reference.path, **arguments) as llm:
        expected = tokens(llm.generate(reference.prompts, greedy(), use_tqdm=False))
        assert llm.reset_prefix_cache()
        done = {}
        for i, prompt in enumerate(reference.prompts):
            llm.llm_engine.add_request(f"text {i}", prompt, greedy())
            llm.llm_engine.add_request(f"last {i}", prompt, PoolingParams())
            llm.llm_engine.add_request(f"mean {i}", prompt, PoolingParams(pooling_type="MEAN"))
        while llm.llm_engine.has_unfinished_requests():
            done |= {output.request_id: output for output in llm.llm_engine.step()}
        assert llm.llm_engine.client.core.executor.worker.runner.graphs is not None
    every = range(len(reference.prompts))
    assert tokens([done[f"text {i}"] for i in every]) == expected
    assert_close([done[f"last {i}"] for i in every], reference.vectors("LAST"), 1e-3)
    assert_close([done[f"mean {i}"] for i in every], reference.vectors("MEAN"), 1e-3)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 64}, {"dtype": "bfloat16"}])
def test_an_engine_that_only_pools_replays_graphs(reference, options):
    """Of few tokens; more are launched kernel by kernel. Texts beside others, and alone, have the vectors they have
    without graphs, from first tokens to last ones."""
    kinds = [PoolingParams(pooling_type=kind) for kind in ("LAST", "MEAN", "CLS")] + [PoolingParams(task="token_embed")]
    close = 1e-3 if options.get("dtype") is None else 5e-2  # of bfloat16, by which such vectors are 2e-2 off
    found, arguments = {}, {"dtype": "float32", "max_model_len": 256, "runner": "pooling", **options}
    for eager in (True, False):
        with engine(reference.path, enforce_eager=eager, **arguments) as llm:
            runner = llm.llm_engine.client.core.executor.worker.runner
            assert (runner.graphs is None) == eager
            found[eager] = []
            for params in kinds:
                alone = [llm.encode([prompt], params, use_tqdm=False)[0] for prompt in reference.prompts]
                beside = llm.encode(reference.prompts, params, use_tqdm=False)
                many = llm.encode(reference.prompts * 16, params, use_tqdm=False)  # some 5,000 tokens
                found[eager] += [output.outputs.data for output in (*alone, *beside, *many)]
            if not eager:
                assert runner.graphs.decode_rows == [] and runner.graphs.num_replays > len(kinds) * len(
                    reference.prompts
                )
    for exact, replayed in zip(found[True], found[False], strict=True):
        assert exact.shape == replayed.shape and np.abs(exact - replayed).max() < close
    if options.get("dtype") is None:
        with engine(reference.path, **arguments) as llm:
            outputs = llm.encode(reference.prompts, kinds[0], use_tqdm=False)
            assert_close(outputs, reference.vectors("LAST"), 1e-3)
