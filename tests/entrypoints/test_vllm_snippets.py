"""The offline snippets of the documents that specify the system, with the import changed.

Hub names are local folders here: a tiny model under the name that a snippet uses.
"""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from quire import LLM, SamplingParams
from tests.tiny_models import save_tiny

NAMES = ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "meta-llama/Llama-3-8B")
PROMPTS = ["Hello, my name is", "The president of the United States is"]


@pytest.fixture(autouse=True)
def hub_names_are_local(tmp_path, monkeypatch):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for name in NAMES:
        folder = tmp_path / name
        save_tiny("llama", folder, vocab_size=len(alphabet))
        tokenizer.save(str(folder / "tokenizer.json"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TQDM_DISABLE", "1")


def test_two_prompts():
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    llm = LLM(model="TinyLlama/TinyLlama-1.1B-Chat-v1.0")
    outputs = llm.generate(PROMPTS, sampling_params)
    assert [output.prompt for output in outputs] == PROMPTS
    assert all(len(output.outputs[0].token_ids) == 16 for output in outputs)


def test_one_and_several():
    llm = LLM(model="meta-llama/Llama-3-8B")
    params = SamplingParams(temperature=0.7, max_tokens=256)
    output = llm.generate("Hello, world!", params)
    assert len(output) == 1
    outputs = llm.generate(["prompt1", "prompt2", "prompt3"], params)
    for output in outputs:
        print(output.outputs[0].text)
    assert len(llm.generate(["Hello, world!"])) == 1


def test_a_long_prefix_is_computed_once():
    long_prefix = "<a piece of text that is encoded into more than block_size tokens>"
    llm = LLM(model="TinyLlama/TinyLlama-1.1B-Chat-v1.0")
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    first = llm.generate(long_prefix + PROMPTS[0], sampling_params)
    second = llm.generate(long_prefix + PROMPTS[1], sampling_params)
    assert first[0].num_cached_tokens == 0
    assert second[0].num_cached_tokens == len(long_prefix) // 16 * 16


@pytest.mark.parametrize(
    "arguments",
    [
        {"speculative_config": {"method": "mlp_speculator", "model": "a/b", "num_speculative_tokens": 3}},
        {"data_parallel_size": 4},
        {"kv_transfer_config": {"kv_connector": "NixlConnector"}},
    ],
)
def test_unavailable_arguments_are_refused(arguments):
    with pytest.raises(ValueError, match="not available yet"):
        LLM(model="TinyLlama/TinyLlama-1.1B-Chat-v1.0", **arguments)


def test_neutral_arguments_are_accepted():
    LLM(model=NAMES[0], tensor_parallel_size=1, quantization=None, trust_remote_code=False, max_model_len="auto")


def test_both_names_of_structured_output():
    from quire.sampling_params import GuidedDecodingParams, StructuredOutputsParams

    wanted = StructuredOutputsParams(choice=["Positive", "Negative"])
    assert SamplingParams(guided_decoding=GuidedDecodingParams(choice=wanted.choice)).structured_outputs == wanted
