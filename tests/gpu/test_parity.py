"""The same engine on a CUDA device: greedy output equals transformers' token for token, in float32."""

import pytest
import torch

from tests.engine.test_parity import GREEDY, SETTINGS, assert_equal
from tests.tiny_models import FAMILIES, make_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request, tmp_path_factory):
    return make_reference(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize(
    ("setting", "graphs"),
    [
        ("all at once", True),
        ("all at once", False),
        ("chunks of 16", False),
        ("preemption", True),
        ("depth 0", False),
        ("depth 2, chunks, preemption", True),
    ],
)
def test_equal_to_transformers(reference, setting, graphs):
    from quire import LLM

    arguments = {"kv_cache_memory_bytes": 1 << 25, "max_model_len": 256, **SETTINGS[setting]}
    if "num_gpu_blocks_override" in arguments:
        arguments["num_gpu_blocks_override"] *= reference.num_groups
    arguments["enforce_eager"] = not graphs
    with LLM(reference.path, device="cuda", dtype="float32", skip_tokenizer_init=True, **arguments) as llm:
        assert_equal(llm.generate(reference.prompts, GREEDY, use_tqdm=False), reference)


def test_sampling_parameters_run_on_the_device(reference):
    from quire import LLM, SamplingParams

    params = SamplingParams(
        temperature=0.8,
        top_p=0.9,
        top_k=40,
        min_p=0.01,
        seed=5,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        logit_bias={3: 2.0},
        min_tokens=4,
        bad_words_token_ids=[[5], [6, 7]],
        logprobs=3,
        prompt_logprobs=2,
        n=3,
        max_tokens=16,
    )
    arguments = {"skip_tokenizer_init": True, "max_model_len": 256, "enforce_eager": True}
    with LLM(reference.path, device="cuda", dtype="float32", kv_cache_memory_bytes=1 << 25, **arguments) as llm:
        first, second = (llm.generate(reference.prompts, params, use_tqdm=False) for _ in range(2))
    assert [[c.token_ids for c in o.outputs] for o in first] == [[c.token_ids for c in o.outputs] for o in second]
