"""Gemma 3 270M with its real weights, from a GGUF alone: its config, its tokenizer, its text."""

import math

import pytest
import torch

from quire import LLM, SamplingParams
from quire.checkpoint.config import load_hf_config
from quire.checkpoint.resolve import resolve_model
from quire.kernels.native import quantized
from quire.models.loading.loader import load_model
from quire.quantization.block_quantized import block_quantized_weights
from quire.tokenizer.load import load_tokenizer
from tests.models.gemma3_weights import gemma3_file

COUNT = 32
LIST = " ".join(f"On day {n} the ship sailed {n * 7} miles to the west." for n in range(1, 50))
PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a little girl who",
    "def fibonacci(n):\n    ",
    LIST,  # longer than the windows of 512
]
TURNS = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message.role }}\n{{ message.content }}"
    "<end_of_turn>\n{% endfor %}<start_of_turn>model\n"
)
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)


@pytest.fixture(scope="module")
def path() -> str:
    return str(gemma3_file())


@pytest.fixture(scope="module")
def prompts(path) -> list[list[int]]:
    tokenizer = load_tokenizer(resolve_model(path))
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def reference(path, prompts) -> list[tuple[list[int], float]]:
    """Of each prompt transformers' greedy tokens, by its own reading of the file, and their mean log-probability."""
    import transformers

    folder, _, name = path.rpartition("/")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    found = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=COUNT, min_new_tokens=COUNT, do_sample=False,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        tokens = out.sequences[0, len(prompt) :].tolist()
        scores = torch.stack(out.logits)[:, 0].log_softmax(-1)
        found.append((tokens, float(scores[range(COUNT), tokens].mean())))
    return found


def test_tokens_of_text(prompts):
    assert prompts[0] == [2, 818, 5279, 529, 7001, 563]
    assert all(prompt[0] == 2 for prompt in prompts)
    assert len(prompts[3]) > 600


def test_text_round_trips(path):
    tokenizer = load_tokenizer(resolve_model(path))
    for text in (
        "  two  spaces\n\n\tand a tab",
        "Grüße, 世界! 🧑‍🚀 \u2066x\u2069",
        "12345 + 67 = 12412",
        " ".join("aé漢"),
    ):
        ids = tokenizer.encode(text)
        assert ids[0] == 2 and tokenizer.decode(ids[1:]) == text


def test_greedy_text_is_that_of_transformers(path, prompts, reference):
    with LLM(
        path, dtype="float32", quantization="dequantized", max_model_len=1024, kv_cache_memory_bytes=1 << 29
    ) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        for output, prompt, (tokens, _) in zip(outputs, prompts, reference, strict=True):
            assert output.prompt_token_ids == prompt
            assert output.outputs[0].token_ids == tokens


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_the_same_text_with_drafts(path, method):
    options = {"dtype": "float32", "quantization": "dequantized", "max_model_len": 1024}
    params = [GREEDY] * len(PROMPTS)
    # From likely tokens: between two unlikely neighbours rounding decides, which differs with the batch, drafts or not.
    params += [SamplingParams(top_k=20, seed=n, max_tokens=COUNT, ignore_eos=True) for n in range(len(PROMPTS))]
    texts = []
    for drafts in ({}, {"spec_method": method, "spec_tokens": 4, "spec_adaptive": False}):
        with LLM(path, kv_cache_memory_bytes=1 << 29, **options, **drafts) as llm:
            found = llm.generate(PROMPTS * 2, params, use_tqdm=False)
            texts.append([one.outputs[0].token_ids for one in found])
            stats = llm.llm_engine.client.core.scheduler.drafts.stats
    assert texts[0] == texts[1] and stats.num_accepted_tokens > 10


def test_blocks_stay_quantized(path):
    checkpoint = resolve_model(path)
    model = load_model(checkpoint, load_hf_config(checkpoint), torch.bfloat16, "cpu", quantization="gguf")
    parts = [part for weight in block_quantized_weights(model) for part in weight.parts]
    assert all(isinstance(part, quantized.Packed) for part in parts)
    names = {index: name for name, kind in quantized.FORMATS.items() for index in (kind.index,)}
    assert {names[part.format.index] for part in parts} == {"Q4_K", "Q5_0", "Q6_K", "Q8_0"}


def test_quantized_it_finds_the_text_as_likely(path, prompts, reference):
    """Products of rounded activations choose other words now and then, but must judge the same text alike."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    whole = [prompt + tokens for prompt, (tokens, _) in zip(prompts, reference, strict=True)]
    with LLM(path, quantization="gguf", max_model_len=1024, kv_cache_memory_bytes=1 << 28) as llm:
        for output, ids, (_, wanted) in zip(llm.generate(whole, params, use_tqdm=False), whole, reference, strict=True):
            entries = list(zip(ids, output.prompt_logprobs, strict=True))[-COUNT:]
            mean = math.fsum(entry[token].logprob for token, entry in entries) / COUNT
            assert mean == pytest.approx(wanted, abs=0.15)


def test_chat(path):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    with LLM(path, quantization="gguf", max_model_len=256, kv_cache_memory_bytes=1 << 28) as llm:
        with pytest.raises(ValueError, match="chat template"):
            llm.chat(question, GREEDY)  # a base model: the file has none
        (output,) = llm.chat(question, GREEDY, chat_template=TURNS, use_tqdm=False)
        assert output.prompt_token_ids[:3] == [2, 105, 2364]  # <bos><start_of_turn>user
        assert len(output.outputs[0].token_ids) == COUNT and output.outputs[0].text
