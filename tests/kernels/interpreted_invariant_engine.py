"""An engine with the kernels of `--batch-invariant`, on a CPU in Triton's interpreter: run by test_interpreter.py."""

import pytest

import tests.kernels.interpreter_fix  # noqa: F401
from quire.kernels.triton import invariant_linear
from quire.layers import moe_backend
from quire.platforms.cpu import CpuPlatform
from quire.quantization import unquantized
from tests.tiny_models import prompts, save_tiny

LENGTHS = (3, 70, 17)  # one of them long enough that the last layer is computed for its last token alone
OPTIONS = {"skip_tokenizer_init": True, "use_tqdm_on_load": False, "num_gpu_blocks_override": 40, "max_model_len": 128}
OPTIONS |= {"dtype": "float16", "batch_invariant": True, "enforce_eager": True}


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(CpuPlatform, "supports_triton", True)
    monkeypatch.setattr(unquantized, "can_fuse", lambda weight: True)
    monkeypatch.setattr(moe_backend, "_why_not_triton", lambda *about: None)
    moe_backend.choose_moe_backend.cache_clear()
    monkeypatch.setattr(invariant_linear, "ENOUGH", 400)  # else all weights of a tiny model have as many slabs
    yield
    moe_backend.choose_moe_backend.cache_clear()


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "mixtral"])
def test_requests_have_the_bits_that_they_have_alone(family, tmp_path, as_on_a_gpu):
    from quire import LLM, SamplingParams

    save_tiny(family, tmp_path, num_hidden_layers=2)
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, logprobs=1)
    asked = [{"prompt_token_ids": ids} for ids in prompts(LENGTHS)]

    def answers(llm, some):
        made = [each.outputs[0] for each in llm.generate(some, params, use_tqdm=False)]
        return [[(list(each.token_ids), [p.logprob for at in each.logprobs for p in at.values()])] for each in made]

    with LLM(str(tmp_path), **OPTIONS, enable_prefix_caching=False) as llm:
        alone = [answers(llm, [each])[0] for each in asked]
        # As a trainer computes samples again.
        read = SamplingParams(max_tokens=1, prompt_logprobs=1)
        for prompt, [(tokens, logprobs)] in zip(asked, alone, strict=True):
            (again,) = llm.generate({"prompt_token_ids": prompt["prompt_token_ids"] + tokens}, read, use_tqdm=False)
            assert [p.logprob for at in again.prompt_logprobs[-3:] for p in at.values()] == logprobs
    with LLM(str(tmp_path), **OPTIONS, max_num_batched_tokens=32, max_num_seqs=3) as llm:
        assert answers(llm, asked) == alone
        assert answers(llm, asked[::-1]) == alone[::-1]  # prefixes are cached
