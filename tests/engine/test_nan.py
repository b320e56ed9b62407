"""A request with NaN logits fails, alone."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from tests.tiny_models import make_reference

POISON = 7


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    """A tiny model whose embedding of one token is NaN."""
    path = tmp_path_factory.mktemp("poisoned")
    reference = make_reference("llama", path)
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    return reference


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_only_the_request_with_nan_fails(poisoned, temperature, logprobs):
    params = SamplingParams(
        temperature=temperature, seed=1, max_tokens=6, logprobs=logprobs, allowed_token_ids=[3, 4, 5]
    )
    good, bad = [3, 4, 5, 3, 4], [3, 4, POISON, 5]
    arguments = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64, "kv_cache_memory_bytes": 1 << 22}
    with LLM(poisoned.path, **arguments) as llm:
        (alone,) = llm.generate([{"prompt_token_ids": good}], params, use_tqdm=False)
        outputs = llm.generate([{"prompt_token_ids": p} for p in (good, bad, good)], params, use_tqdm=False)
        again = llm.generate([{"prompt_token_ids": good}], params, use_tqdm=False)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
    assert outputs[1].outputs[0].token_ids == [] and "NaN" in outputs[1].error
    assert {tuple(o.outputs[0].token_ids) for o in (alone, outputs[0], outputs[2], *again)} == {
        tuple(alone.outputs[0].token_ids)
    }
