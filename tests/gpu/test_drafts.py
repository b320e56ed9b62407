"""Steps that verify drafts on a GPU: the same text as without, through graphs and without."""

from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from tests.spec_decode import proposers, test_dependent_logits
from tests.structured_output.model import save_model
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.gpu
PROMPTS = [[5, 6, 7], list(range(3, 40)), [9] * 20, [4, 8, 15, 16, 23, 42], *([i, i + 1, i + 2] for i in range(8))]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    model = tmp_path_factory.mktemp("model")
    save_tiny("llama", model)
    return str(model)


def texts(model, **options):
    llm = LLM(
        model,
        skip_tokenizer_init=True,
        max_model_len=128,
        dtype="float32",
        max_num_seqs=16,
        num_gpu_blocks_override=200,
        **{"spec_adaptive": False} | options,
    )
    try:
        params = [
            SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=20 + i, ignore_eos=True)
            for i in range(len(PROMPTS))
        ]
        found = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
    finally:
        llm.shutdown()
    return [list(one.outputs[0].token_ids) for one in found]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("method", ["Fixed", "HalfRight"])
def test_the_text_is_that_of_one_token_a_step(tiny, method, eager):
    wanted = texts(tiny)
    proposers.KNOWN[:] = [[*prompt, *text] for prompt, text in zip(PROMPTS, wanted, strict=True)]
    config = {"method": f"tests.spec_decode.proposers:{method}", "num_speculative_tokens": 3}
    assert texts(tiny, speculative_config=config, enforce_eager=eager) == wanted


def test_adaptive_steps_replay_graphs(tiny):
    """All rows of a step have the same number of drafts, of which there are graphs."""
    wanted = texts(tiny)
    proposers.KNOWN[:] = [[*prompt, *text] for prompt, text in zip(PROMPTS, wanted, strict=True)]
    for method in ("Right", "HalfRight", "Fixed", "Finds"):
        options = {"spec_method": f"tests.spec_decode.proposers:{method}", "spec_tokens": 3, "spec_adaptive": True}
        assert texts(tiny, **options) == wanted
    with LLM(tiny, skip_tokenizer_init=True, max_model_len=128, dtype="float32", max_num_seqs=16, **options) as llm:
        profile = llm.collective_rpc("get_draft_profile")[0]
        assert profile.sizes == (3,) and profile.plain and profile.drafted


@pytest.mark.parametrize("eager", [False, True])
def test_logits_that_depend_on_tokens_before(tmp_path, eager):
    """Penalties, grammars and the rest: a row of each kind, greedy and sampled."""
    model = save_model(Path(tmp_path), test_dependent_logits.FAR_APART)
    single = test_dependent_logits.generate(model)
    prompts = [prompt["prompt_token_ids"] for prompt in test_dependent_logits.PROMPTS]
    proposers.KNOWN[:] = [[*ids, *one.token_ids] for ids, one in zip(prompts, single.outputs, strict=True)]
    for method, count in (("HalfRight", 3), ("Right", 4), ("Fixed", 2)):
        config = test_dependent_logits.drafting(method, count)
        run = test_dependent_logits.generate(model, speculative_config=config, enforce_eager=eager)
        test_dependent_logits.check(run, single)
