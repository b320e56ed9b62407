"""`--batch-invariant` on a GPU: the same tokens and logprobs, to the bit, for random schedules, and computed again as a
prompt."""

import random

import pytest
import torch

from tests.engine.test_same_text import PREFIX, SIZES, WIDE, answers, requests
from tests.tiny_models import save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OPTIONS = SIZES | {"skip_tokenizer_init": True, "batch_invariant": True, "kv_cache_memory_bytes": 1 << 28}
NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}}


@pytest.fixture(scope="module", params=["qwen3", "gemma3", "mixtral"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, folder, **WIDE)
    return str(folder)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("more", [{}, {"enforce_eager": True}, NGRAM], ids=["graphs", "eager", "ngram"])
def test_random_schedules(model, dtype, more):
    check_random_schedules(model, {"dtype": dtype}, more)


def test_random_schedules_of_two_ranks(model, monkeypatch):
    monkeypatch.setenv("QUIRE_SHARE_GPU", "1")
    check_random_schedules(model, {"dtype": "bfloat16", "tensor_parallel_size": 2}, {})


def check_random_schedules(model, both, more):
    from quire import LLM

    chance = random.Random(0)
    with LLM(model, **OPTIONS, **both, enable_prefix_caching=False) as alone:
        drawn = [list(zip(*requests(chance), strict=True)) for _ in range(3)]
        wanted = [[answers(alone, [p], [s])[0] for p, s in zip(*each, strict=True)] for each in drawn]
    for chunk, caching in ((48, True), (700, False), (4096, True)):
        options = {"max_num_batched_tokens": chunk, "enable_prefix_caching": caching}
        with LLM(model, **OPTIONS, **both, **options, **more) as llm:
            for (prompts, params), right in zip(drawn, wanted, strict=True):
                assert answers(llm, list(prompts), list(params)) == right, options


def test_logprobs_computed_again_as_a_prompt(model):
    """Training on samples: the policy's logprobs are those that it sampled by."""
    from quire import LLM, SamplingParams

    with LLM(model, **OPTIONS, dtype="bfloat16") as llm:
        prompts = [{"prompt_token_ids": PREFIX[: 7 + 150 * i]} for i in range(6)]
        sampled = SamplingParams(max_tokens=40, temperature=1.0, seed=3, logprobs=0, ignore_eos=True)
        for prompt, made in zip(prompts, llm.generate(prompts, sampled, use_tqdm=False), strict=True):
            tokens = list(made.outputs[0].token_ids)
            whole = {"prompt_token_ids": prompt["prompt_token_ids"] + tokens}
            (again,) = llm.generate([whole], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
            got = [
                each[token].logprob for token, each in zip(tokens, again.prompt_logprobs[-len(tokens) :], strict=True)
            ]
            assert got == [each[token].logprob for token, each in zip(tokens, made.outputs[0].logprobs, strict=True)]
