"""A proposer that draws its drafts, through the engine: texts have the distribution of the target."""

import itertools
import math

import numpy as np
import pytest

from quire import LLM, SamplingParams
from tests.spec_decode import proposers
from tests.spec_decode.counting import count_verified
from tests.spec_decode.sampling_cases import p_value
from tests.tiny_models import save_tiny

PROMPT = [5, 6, 7]
TOP_K, TEMPERATURE, LENGTH = 3, 1.5, 4
NUM_TEXTS = 2000  # of four tokens


def open_engine(model, **options):
    options = {"max_num_seqs": 256, "max_model_len": 64, "dtype": "float32", "skip_tokenizer_init": True} | options
    return LLM(model, use_tqdm_on_load=False, **options)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    model = tmp_path_factory.mktemp("model")
    save_tiny("llama", model, num_hidden_layers=1)
    return str(model)


@pytest.fixture(scope="module")
def probabilities(tiny):
    """Of every possible text, from the model's own logprobs."""
    found = {(): 1.0}
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=TOP_K)
    with open_engine(tiny) as llm:
        for length in range(LENGTH):
            texts = [text for text in found if len(text) == length]
            outputs = llm.generate([{"prompt_token_ids": [*PROMPT, *text]} for text in texts], params, use_tqdm=False)
            for text, one in zip(texts, outputs, strict=True):
                [logprobs] = one.outputs[0].logprobs
                shares = {token: math.exp(entry.logprob / TEMPERATURE) for token, entry in logprobs.items()}
                for token, share in shares.items():
                    found[*text, token] = found[text] * share / sum(shares.values())
    return {text: share for text, share in found.items() if len(text) == LENGTH}


@pytest.fixture
def chain(probabilities, monkeypatch):
    """Drafts that may come: each token's usual followers, at odds that have nothing to do with the target's."""
    tokens = sorted(set(itertools.chain.from_iterable(probabilities)))
    pairs = {pair for text in probabilities for pair in itertools.pairwise(text)}
    logits = {a: [3.0 * ((a, b) in pairs) + (a * 7 + b * 3) % 5 / 4 for b in tokens] for a in tokens}
    monkeypatch.setattr(proposers, "CHAIN", logits)


@pytest.mark.parametrize(
    "options",
    [{}, {"async_depth": 2, "num_gpu_blocks_override": 100, "max_num_seqs": 48, "block_size": 4}],
    ids=["default", "preempted"],
)
def test_texts_have_the_distribution_of_the_target(tiny, probabilities, chain, options, monkeypatch):
    verified = count_verified(monkeypatch, num_drafts=2)
    config = {"method": "tests.spec_decode.proposers:Sampling", "num_speculative_tokens": 2}
    params = [
        SamplingParams(temperature=TEMPERATURE, top_k=TOP_K, seed=seed, max_tokens=LENGTH, ignore_eos=True)
        for seed in range(NUM_TEXTS)
    ]
    with open_engine(tiny, speculative_config=config, spec_adaptive=False, **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": PROMPT}] * NUM_TEXTS, params, use_tqdm=False)
    counts = dict.fromkeys(probabilities, 0)
    for one in outputs:
        counts[tuple(one.outputs[0].token_ids)] += 1
    assert p_value(np.asarray(list(counts.values())), np.asarray(list(probabilities.values()))) > 0.01
    assert np.mean(verified.accepted) > 0.3


def test_greedy_text_and_logprobs_are_those_of_one_token_a_step(tiny, chain):
    params = [
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=1.5, top_k=3, seed=1, max_tokens=20, ignore_eos=True, logprobs=2),
    ]
    config = {"method": "tests.spec_decode.proposers:Sampling", "num_speculative_tokens": 2}
    prompts = [{"prompt_token_ids": PROMPT}] * 2
    with open_engine(tiny) as llm:
        greedy, _ = llm.generate(prompts, params, use_tqdm=False)
    with open_engine(tiny, speculative_config=config, spec_adaptive=False) as llm:
        same, random = llm.generate(prompts, params, use_tqdm=False)
    assert same.outputs[0].token_ids == greedy.outputs[0].token_ids
    # Whichever way a token came to be, its logprob is that of the token.
    for token, logprobs in zip(random.outputs[0].token_ids, random.outputs[0].logprobs, strict=True):
        assert logprobs[token].rank <= 3
