"""Steps of several tokens through the real engine: the same text with any drafts, whatever else is going on."""

import pytest

from quire import LLM, SamplingParams
from tests.spec_decode import proposers
from tests.tiny_models import save_tiny

PROMPTS = [[5, 6, 7], list(range(3, 40)), [9] * 20, [4, 8, 15, 16, 23, 42], list(range(60, 70))]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=17, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1.2, top_k=20, top_p=0.9, seed=5, max_tokens=30, repetition_penalty=1.3),
    SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    model = tmp_path_factory.mktemp("model")
    save_tiny("llama", model)
    return str(model)


def outputs(model, params=PARAMS, **options):
    llm = LLM(model, skip_tokenizer_init=True, max_model_len=128, dtype="float32", **options)
    try:
        found = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
        state = llm.llm_engine.get_state() if hasattr(llm.llm_engine, "get_state") else None
    finally:
        llm.shutdown()
    return [one.outputs[0] for one in found], state


@pytest.fixture(scope="module")
def reference(tiny):
    found, _ = outputs(tiny)
    proposers.KNOWN[:] = [[*prompt, *one.token_ids] for prompt, one in zip(PROMPTS, found, strict=True)]
    return found


@pytest.mark.parametrize("method", ["Fixed", "Random", "HalfRight"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": False},
        {"max_num_batched_tokens": 16, "block_size": 8},
        {"num_gpu_blocks_override": 9, "block_size": 16},
        {"enable_prefix_caching": False, "max_num_seqs": 2},
    ],
    ids=["default", "synchronous", "chunked", "preempted", "few rows"],
)
def test_the_text_is_that_of_one_token_a_step(tiny, reference, method, options):
    for count in (1, 3):
        config = {"method": f"tests.spec_decode.proposers:{method}", "num_speculative_tokens": count}
        found, _ = outputs(tiny, speculative_config=config, **options)
        for one, wanted in zip(found, reference, strict=True):
            assert list(one.token_ids) == list(wanted.token_ids)
            assert one.finish_reason == wanted.finish_reason
        ours, theirs = found[2].logprobs, reference[2].logprobs
        assert [set(entry) for entry in ours] == [set(entry) for entry in theirs]


def test_a_stop_token_inside_accepted_drafts_ends_the_text(tiny, reference):
    text = list(reference[0].token_ids)
    stop = text[10]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop_token_ids=[stop])
    config = {"method": "tests.spec_decode.proposers:HalfRight", "num_speculative_tokens": 4}
    found, _ = outputs(tiny, params, speculative_config=config)
    assert list(found[0].token_ids) == text[: text.index(stop) + 1]
    assert found[0].finish_reason == "stop" and found[0].stop_reason == stop


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "no_such", "num_speculative_tokens": 2}, "not available yet"),
        ({"method": "a:B", "num_speculative_tokens": 0}, "between 1 and 16"),
        ({"method": "a:B", "num_speculative_tokens": 2, "x": 1}, "allowed: method"),
        ({"method": "no.such:Class", "num_speculative_tokens": 2}, "cannot be imported"),
    ],
)
def test_mistakes_are_explained(tiny, config, message):
    with pytest.raises(ValueError, match=message):
        outputs(tiny, speculative_config=config)
