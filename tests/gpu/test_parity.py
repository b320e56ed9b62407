"""The same engine on a CUDA device: greedy output equals transformers' token for token, in float32."""

import msgspec
import pytest
import torch

from tests.engine.test_parity import GREEDY, SETTINGS, assert_equal
from tests.tiny_models import CORE, FAMILIES, make_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


# Families with a kernel feature of their own: these are captured, too.
CAPTURED = ("gemma2", "gpt-oss", "qwen3-moe", "falcon-rw", "gpt2", "cohere2")


@pytest.fixture(scope="module", params=CORE)
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
    check(reference, setting, graphs)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in CORE])
def test_every_other_family(family, tmp_path):
    reference = make_reference(family, tmp_path, (1, 17, 33, 70), 48)
    check(reference, "all at once", family in CAPTURED)
    check(reference, "depth 2, chunks, preemption", False)


def check(reference, setting, graphs):
    from quire import LLM

    arguments = {"kv_cache_memory_bytes": 1 << 25, "max_model_len": 256, **SETTINGS[setting]}
    if "num_gpu_blocks_override" in arguments:
        arguments["num_gpu_blocks_override"] *= reference.num_groups
    arguments["enforce_eager"] = not graphs
    with LLM(reference.path, device="cuda", dtype="float32", skip_tokenizer_init=True, **arguments) as llm:
        params = msgspec.structs.replace(GREEDY, max_tokens=len(reference.token_ids[0]))
        assert_equal(llm.generate(reference.prompts, params, use_tqdm=False), reference)


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
