"""Logprobs of tokens that requests name, on a GPU: those of the whole vocabulary at the same places."""

import pytest
import torch

from tests.tiny_models import prompts, save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = [{"prompt_token_ids": ids} for ids in prompts((3, 40, 700))]
NAMED = [5, 9, 60]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    from quire import LLM

    folder = tmp_path_factory.mktemp("qwen3")
    save_tiny("qwen3", folder, max_position_embeddings=2048)
    settings = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 1024, "max_logprobs": -1}
    with LLM(str(folder), kv_cache_memory_bytes=1 << 27, **settings) as llm:
        yield llm


def generate(llm, params, **more):
    from quire import SamplingParams

    common = {"temperature": 0, "max_tokens": 8, "ignore_eos": True} | more
    wanted = [SamplingParams(**common, **one) for one in params]
    return llm.generate(PROMPTS, wanted, use_tqdm=False)


@pytest.mark.parametrize("n", [1, 3])
def test_named_tokens(llm, n):
    drawn = {"n": n, "seed": 4, "temperature": 1.0} if n > 1 else {}
    whole = generate(llm, [{"logprobs": -1}] * 3, **drawn)
    named = generate(llm, [{"logprob_token_ids": NAMED}, {"logprobs": 2}, {"logprob_token_ids": NAMED[:1]}], **drawn)
    for full, some, count in zip(whole, named, (3, 2, 1), strict=True):
        for a, b in zip(full.outputs, some.outputs, strict=True):
            assert a.token_ids == b.token_ids
            for expected, entry in zip(a.logprobs, b.logprobs, strict=True):
                assert count <= len(entry) <= count + 1
                for token, found in entry.items():
                    assert found.logprob == pytest.approx(expected[token].logprob, abs=1e-4)


def test_candidates_along_a_prompt(llm):
    whole = generate(llm, [{"prompt_logprobs": -1}] * 3)
    rows = [[NAMED] * (len(prompt["prompt_token_ids"]) - 2) for prompt in PROMPTS]
    params = [{"prompt_logprob_token_ids": one, "prompt_logprob_start": 1} for one in rows]
    for full, scored in zip(whole, generate(llm, params), strict=True):
        scores = scored.prompt_token_id_logprobs
        for row, entry in zip(scores.tolist(), full.prompt_logprobs[2:], strict=True):
            assert row == pytest.approx([entry[token].logprob for token in NAMED], abs=1e-4)
