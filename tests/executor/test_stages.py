"""Models split into stages, which must say what one worker says."""

import pytest

from quire import LLM
from tests.executor.test_ranks import PARAMS, PROMPTS
from tests.tiny_models import save_tiny

STAGES = "tests.executor.stages:"
OPTIONS = {
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "dtype": "float32",
    "kv_cache_memory_bytes": 1 << 22,
    "max_num_batched_tokens": 32,
}


def start(model, layout=None, **options) -> LLM:
    backend = {} if layout is None else {"distributed_executor_backend": STAGES + layout}
    return LLM(str(model), **(OPTIONS | options | backend))


def generate(llm: LLM, prompts=PROMPTS, params=PARAMS):
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


def outputs(model, layout=None, prompts=PROMPTS, params=PARAMS, **options):
    llm = start(model, layout, **options)
    try:
        return generate(llm, prompts, params)
    finally:
        llm.shutdown()


def tokens(found):
    return [list(one.token_ids) for request in found for one in request.outputs]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2", "mixtral"])
def test_stages_say_what_one_worker_says(tmp_path, family):
    """Prompts in chunks, logprobs, penalties; tied heads, windows, a scaled embedding, learned positions, experts."""
    save_tiny(family, tmp_path)
    wanted = outputs(tmp_path)
    for layout in ("TwoStages", "FourStages"):
        found = outputs(tmp_path, layout)
        assert tokens(found) == tokens(wanted)
        for ours, theirs in zip(found[0].outputs[0].logprobs, wanted[0].outputs[0].logprobs, strict=True):
            assert {token: pytest.approx(one.logprob, abs=1e-3) for token, one in ours.items()} == {
                token: one.logprob for token, one in theirs.items()
            }
