"""A draft model on a GPU: the target's text, through graphs and without, and all drafts right where they must be."""

import pytest

from quire import LLM, SamplingParams
from tests.spec_decode import test_draft_model
from tests.spec_decode.test_draft_model import K, check, generate, models  # noqa: F401

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def alone(models):  # noqa: F811
    return {name: generate(models[name]) for name in ("target", "gemma3")}


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 24, "block_size": 16}])
@pytest.mark.parametrize("draft", ["small", "other heads", "windows"])
@pytest.mark.parametrize("target", ["target", "gemma3"])
def test_the_text_is_the_targets(models, alone, target, draft, options):  # noqa: F811
    check(generate(models[target], models[draft], **options), alone[target])


@pytest.mark.parametrize("eager", [False, True])
def test_the_target_as_its_own_draft_is_always_right(models, eager):  # noqa: F811
    params = SamplingParams(temperature=0, max_tokens=1 + 9 * (K + 1), ignore_eos=True)
    options = {"async_scheduling": False, "enforce_eager": eager}
    for prompt in ([7], list(range(3, 19)), list(range(3, 50))):
        run = generate(models["target"], models["target"], [prompt], params, **options)
        assert run.num_steps == 1 + 9


def test_what_it_was_left_out_of_is_computed_later(models):  # noqa: F811
    test_draft_model.test_what_it_was_left_out_of_is_computed_later(models, 512)


def test_limits(models):  # noqa: F811
    test_draft_model.test_limits(models)


def test_memory_is_measured_with_the_draft(models):  # noqa: F811
    """Without a given number of blocks: the proposal's steps and graphs are part of what is not the cache's."""
    config = {"method": "draft_model", "model": models["small"], "num_speculative_tokens": K}
    options = {"max_model_len": 128, "dtype": "float32", "gpu_memory_utilization": 0.1}
    with LLM(models["target"], skip_tokenizer_init=True, speculative_config=config, **options) as llm:
        found = llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=20), use_tqdm=False)
        assert len(found[0].outputs[0].token_ids) == 20
        proposer = llm.llm_engine.client.core.executor.worker.proposer
        assert proposer.graphs.run([], 0), "nothing was captured"
