"""Every built-in family once: logits of a prompt, then greedy tokens through the engine, both as transformers'."""

import pytest
import torch

from quire import LLM, SamplingParams
from quire.checkpoint.config import load_hf_config
from quire.checkpoint.resolve import resolve_model
from quire.models.loading.loader import load_model
from tests.models.helpers import CPU, TinyRunner
from tests.tiny_models import FAMILIES, make_reference, prompts, save_tiny

LENGTHS = (1, 17, 33, 70)
NUM_TOKENS = 48
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
# Batched, cut into chunks, preempted: blocks for little more than one request.
TIGHT = {"max_num_batched_tokens": 24, "max_model_len": 144, "num_gpu_blocks_override": 11}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_prompt(family, tmp_path):
    reference = save_tiny(family, tmp_path)
    (prompt,) = prompts((50,))
    with torch.inference_mode():
        wanted = reference(torch.tensor([prompt])).logits[0]
    checkpoint = resolve_model(str(tmp_path))
    ours = load_model(checkpoint, load_hf_config(checkpoint), torch.float32, CPU)
    runner = TinyRunner(ours, 1, block_size=4)
    parts = [runner.step([(0, prompt[at : at + 20])])[0] for at in range(0, 50, 20)]
    torch.testing.assert_close(torch.cat(parts), wanted, atol=1e-3, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_batched_chunked_preempted_and_cached(family, tmp_path):
    reference = make_reference(family, tmp_path, LENGTHS, NUM_TOKENS)
    blocks = TIGHT["num_gpu_blocks_override"] * reference.num_groups
    with LLM(
        reference.path, dtype="float32", skip_tokenizer_init=True, **TIGHT | {"num_gpu_blocks_override": blocks}
    ) as llm:
        check(llm.generate(reference.prompts, GREEDY, use_tqdm=False), reference)
        assert llm.llm_engine.stats.num_preemptions > 0
        for again in (False, True):
            outputs = llm.generate(reference.prompts[-1], GREEDY, use_tqdm=False)
            check(outputs, reference, first=-1)
            assert outputs[0].num_cached_tokens > 0 or not again


def check(outputs, reference, first=0) -> None:
    wanted = zip(reference.token_ids[first:], reference.logprobs[first:], strict=True)
    for output, (tokens, logprobs) in zip(outputs, wanted, strict=True):
        (completion,) = output.outputs
        assert completion.token_ids == tokens
        chosen = [step[token].logprob for step, token in zip(completion.logprobs, tokens, strict=True)]
        assert chosen == pytest.approx(logprobs, abs=1e-3)
