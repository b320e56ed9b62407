"""Models with transformers' code on a GPU: tokens equal to transformers' own, in graphs and without."""

import pytest
import torch

from tests.models.transformers_sweep import is_greedy, prompts, save

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MODELS = ("qwen3", "stablelm", "gemma2", "gpt_oss", "qwen2_moe", "opt", "persimmon", "roberta")
SETTINGS = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 3},
}


@pytest.mark.parametrize("model_type", MODELS)
def test_equal_to_transformers(tmp_path, model_type):
    from quire import LLM, SamplingParams

    reference = save(model_type, tmp_path)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    fixed = {"model_impl": "transformers", "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128}
    for setting, options in SETTINGS.items():
        with LLM(str(tmp_path), device="cuda", kv_cache_memory_bytes=1 << 25, **fixed, **options) as llm:
            for time in ("first", "again, from the prefix cache"):
                outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts()], params, use_tqdm=False)
                tokens = [list(each.outputs[0].token_ids) for each in outputs]
                right = [is_greedy(reference, *pair) for pair in zip(prompts(), tokens, strict=True)]
                assert all(right), f"{setting}, {time}: {right}"


@pytest.mark.parametrize("model_type", ["qwen3", "stablelm", "gemma2", "qwen2_moe"])
def test_steps_in_bf16_can_be_captured(tmp_path, model_type):
    from quire.checkpoint.config import load_hf_config
    from quire.checkpoint.resolve import resolve_model
    from quire.models.loading.loader import load_model

    save(model_type, tmp_path)
    checkpoint = resolve_model(str(tmp_path))
    config = load_hf_config(checkpoint)
    assert load_model(checkpoint, config, torch.bfloat16, "cuda", model_impl="transformers").capturable
