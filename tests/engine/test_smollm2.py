"""The real SmolLM2, read from its GGUF by us and, independently, by transformers."""

import pytest
import torch

from quire import LLM, SamplingParams
from quire.checkpoint.resolve import resolve_model
from tests.tiny_models import greedy

QUESTIONS = [
    "What is the capital of Italy?",
    "Write one sentence about the sea.",
    "List three prime numbers.",
    "Why is the sky blue? Answer briefly.",
    "Translate 'good morning' to French.",
    "What is 12 plus 30?",
    "Name a famous physicist and what they are known for.",
    "Give me a short poem about rain, with a title.",
]
PROMPTS = [f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in QUESTIONS]
NUM_TOKENS = 64
OPTIONS = {"dtype": "float32", "quantization": "dequantized", "max_model_len": 512, "kv_cache_memory_bytes": 1 << 28}
REPEATED = " ".join(["The cat sat on the mat."] * 6)


@pytest.fixture(scope="module")
def reference_model():
    import transformers

    path = resolve_model(None).path
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="module")
def llm():
    with LLM(**OPTIONS) as llm:
        yield llm


def test_chat_prompts_equal_transformers(llm, reference_model):
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
    for output in llm.generate(PROMPTS[::2], params, use_tqdm=False):
        expected, logprobs = greedy(reference_model, output.prompt_token_ids, NUM_TOKENS)
        completion = output.outputs[0]
        assert completion.token_ids == expected, output.prompt
        assert completion.cumulative_logprob == pytest.approx(sum(logprobs), abs=1e-2)


def test_it_responds_and_stops_at_the_end_of_its_turn(llm):
    (output,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    completion = output.outputs[0]
    assert completion.text == "The capital of Italy is Rome."
    assert completion.finish_reason == "stop" and completion.stop_reason is None
    assert llm.get_tokenizer().decode(completion.token_ids, skip_special_tokens=False).endswith("<|im_end|>")


@pytest.fixture(scope="module")
def without_drafts(llm):
    return texts(llm)


def texts(llm):
    """Greedy ones, then seeded ones. Draws are from likely tokens: between two unlikely neighbours rounding decides,
    which differs with the batch, drafts or not."""
    params = [SamplingParams(temperature=0, max_tokens=24)] * 2
    params += [SamplingParams(temperature=0.8, top_k=20, seed=n, max_tokens=24) for n in range(3)]
    found = llm.generate([PROMPTS[2], REPEATED, REPEATED, PROMPTS[3], PROMPTS[7]], params, use_tqdm=False)
    return [one.outputs[0].token_ids for one in found]


def test_the_same_texts_with_drafts(without_drafts):
    """Other methods than this: tests/spec_decode/test_matrix.py."""
    with LLM(**OPTIONS, max_num_seqs=3, spec_method="ngram", spec_tokens=4, spec_adaptive=False) as llm:
        assert texts(llm) == without_drafts
        assert llm.llm_engine.client.core.scheduler.drafts.stats.num_accepted_tokens > 10
