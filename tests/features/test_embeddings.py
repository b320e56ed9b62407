"""Prompts with embeddings at some or all of their positions, through the real engine."""

import numpy as np
import pytest
import torch

from quire import LLM, Feature, SamplingParams
from tests.tiny_models import prompts, save_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
PROMPTS = prompts((3, 17, 40, 64, 90))
HIDDEN = 64
FEW_BLOCKS = {"num_gpu_blocks_override": 14, "max_model_len": 128}
SETTINGS = {
    "batched": {},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "preempted": FEW_BLOCKS,
    "depth 0": {"async_scheduling": False},
    "depth 2, chunks, preempted": {"async_depth": 2, "max_num_batched_tokens": 13, **FEW_BLOCKS},
    "no prefix caching": {"enable_prefix_caching": False},
    "sliding windows": {"family": "qwen2-mixed"},
    "drafts": {"spec_method": "tests.spec_decode.proposers:Fixed", "spec_tokens": 2, "spec_adaptive": False},
    "engine process": {"multiprocess": True},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folder and transformers' model, by family."""
    made = {}

    def get(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = str(folder), save_tiny(family, folder)
        return made[family]

    return get


def engine(models, family="llama", **options):
    defaults = {"dtype": "float32", "max_model_len": 256, "skip_tokenizer_init": True, "enable_prompt_embeds": True}
    if "num_gpu_blocks_override" not in options:
        defaults["kv_cache_memory_bytes"] = 1 << 24
    return LLM(models(family)[0], **{**defaults, **options})


def random_embeds(length, seed=0):
    return np.random.default_rng(seed).normal(0, 0.15, (length, HIDDEN)).astype(np.float32)


def features_of(ids, seed=0):
    """Embeddings at a part of the prompt, and at a single token behind it."""
    start, length = len(ids) // 4, max(1, len(ids) // 3)
    parts = [Feature("embeds", start, length, random_embeds(length, seed))]
    if len(ids) > 10:
        parts.insert(0, Feature("embeds", len(ids) - 2, 1, random_embeds(1, seed + 1)))
    return parts


def with_features(ids, seed=0):
    return {"prompt_token_ids": ids, "features": features_of(ids, seed)}


@torch.no_grad()
def reference(model, ids, features, count=GREEDY.max_tokens):
    """Transformers' greedy continuation of a prompt with embeddings, and its logprobs."""
    embeds = model.get_input_embeddings()(torch.tensor([ids]))
    for feature in features:
        embeds[0, feature.start : feature.stop] = torch.from_numpy(feature.data)
    tokens, logprobs, given, past = [], [], {"inputs_embeds": embeds}, None
    for _ in range(count):
        out = model(**given, past_key_values=past, use_cache=True)
        scores, past = out.logits[0, -1].log_softmax(-1), out.past_key_values
        tokens.append(int(scores.argmax()))
        logprobs.append(float(scores[tokens[-1]]))
        given = {"input_ids": torch.tensor([[tokens[-1]]])}
    return tokens, logprobs


def assert_equal(model, output, ids, features, completion=0):
    tokens, logprobs = reference(model, ids, features)
    found = output.outputs[completion]
    assert list(found.token_ids) == tokens
    chosen = [entry[token].logprob for entry, token in zip(found.logprobs, tokens, strict=True)]
    assert chosen == pytest.approx(logprobs, abs=1e-3)


def test_embeddings_of_the_ids_give_the_text_of_the_ids(models):
    with engine(models) as llm:
        table = models("llama")[1].get_input_embeddings().weight.detach()
        text = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], GREEDY, use_tqdm=False)
        embeds = [{"prompt_embeds": table[torch.tensor(ids)]} for ids in PROMPTS]
        for wanted, found in zip(text, llm.generate(embeds, GREEDY, use_tqdm=False), strict=True):
            assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
            assert found.outputs[0].logprobs == wanted.outputs[0].logprobs
            assert found.num_cached_tokens == 0


@pytest.mark.parametrize("setting", SETTINGS)
def test_equal_to_the_reference(models, setting):
    options = dict(SETTINGS[setting])
    model = models(options.get("family", "llama"))[1]
    with engine(models, **options) as llm:
        # Beside prompts of text: a step holds both.
        text = [{"prompt_token_ids": ids} for ids in PROMPTS]
        outputs = llm.generate([*map(with_features, PROMPTS), *text], GREEDY, use_tqdm=False)
        for output, ids in zip(outputs, PROMPTS, strict=False):
            assert_equal(model, output, ids, features_of(ids))
        for output, ids in zip(outputs[len(PROMPTS) :], PROMPTS, strict=True):
            assert_equal(model, output, ids, [])
        assert (llm.llm_engine.stats.num_preemptions > 0) == ("preempted" in setting)


@pytest.mark.parametrize("family", ["gemma2", "granite", "gpt2", "opt"])
def test_families_that_scale_embeddings_or_add_positions(models, family):
    with engine(models, family) as llm:
        ids = PROMPTS[2]
        (output,) = llm.generate(with_features(ids), GREEDY, use_tqdm=False)
        assert_equal(models(family)[1], output, ids, features_of(ids))


def test_a_model_that_runs_through_transformers(models):
    with engine(models, model_impl="transformers") as llm:
        ids = PROMPTS[2]
        (output,) = llm.generate(with_features(ids), GREEDY, use_tqdm=False)
        assert_equal(models("llama")[1], output, ids, features_of(ids))


def test_only_equal_content_is_found_in_the_cache(models):
    ids, model = PROMPTS[-1], models("llama")[1]
    with engine(models) as llm:

        def num_cached(seed):
            (output,) = llm.generate(with_features(ids, seed), GREEDY, use_tqdm=False)
            assert_equal(model, output, ids, features_of(ids, seed))
            return output.num_cached_tokens

        assert [num_cached(1), num_cached(1), num_cached(2), num_cached(2)] == [0, 80, 16, 80]
        (text,) = llm.generate({"prompt_token_ids": ids}, GREEDY, use_tqdm=False)
        assert text.num_cached_tokens == 16  # up to the first embedding
        # A hash that the caller gives stands for the content.
        named = [Feature(f.kind, f.start, f.length, f.data, content_hash=b"cat") for f in features_of(ids)]
        for expected in (16, 80):
            (output,) = llm.generate({"prompt_token_ids": ids, "features": named}, GREEDY, use_tqdm=False)
            assert output.num_cached_tokens == expected


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 13}, {"enable_prefix_caching": False}])
def test_completions_that_share_a_prompt_of_embeddings(models, options):
    """The last token of the prompt, which each computes itself, is an embedding."""
    embeds, model = random_embeds(37), models("llama")[1]
    params = SamplingParams(n=3, top_k=1, max_tokens=24, ignore_eos=True, logprobs=1)
    with engine(models, **options) as llm:
        (output,) = llm.generate({"prompt_embeds": torch.from_numpy(embeds)}, params, use_tqdm=False)
        for completion in range(3):
            assert_equal(model, output, [0] * 37, [Feature("embeds", 0, 37, embeds)], completion)


def test_a_request_goes_on_after_tokens_generated_elsewhere(models):
    ids, model = PROMPTS[2], models("llama")[1]
    tokens, _ = reference(model, ids, features_of(ids))
    with engine(models, max_num_batched_tokens=16) as llm:
        prompt = with_features(ids) | {"output_token_ids": tokens[:10]}
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == tokens


def test_half_precision_and_a_leading_dimension_of_one(models):
    embeds = torch.from_numpy(random_embeds(20))
    with engine(models) as llm:
        forms = [embeds.bfloat16(), embeds.bfloat16().float()[None], embeds.bfloat16().float().numpy()]
        outputs = llm.generate([{"prompt_embeds": form} for form in forms], GREEDY, use_tqdm=False)
        assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


def bad(start=0, length=2, data=None, **fields):
    data = random_embeds(length) if data is None else data
    return {"prompt_token_ids": [1, 2, 3, 4], "features": [Feature("embeds", start, length, data, **fields)]}


INFINITE = np.full((2, HIDDEN), np.inf, np.float32)
WRONG = {
    "0 to 3": bad(start=3),
    "must be one or more of": bad(length=0, data=random_embeds(1)),
    r"\[2, 64\]": bad(data=random_embeds(3)),
    "hidden size": bad(data=np.ones((2, 63), np.float32)),
    "floating-point": bad(data=np.ones((2, HIDDEN), np.int32)),
    "finite": bad(data=INFINITE),
    "it must be an array of float16": bad(data=[[1.0]]),
    "longdouble|float128": bad(data=np.ones((2, HIDDEN), np.longdouble)),
    "beyond the range of float32": bad(data=np.full((2, HIDDEN), 1e300)),
    "at most 64 are allowed": bad(content_hash=b"x" * 65),
    "at most 1024 are allowed": {"prompt_token_ids": [1] * 200, "features": bad()["features"] * 1025},
    "must be bytes": bad(content_hash="cat"),
    "one axis": bad(positions=np.zeros((3, 2), np.int64)),
    "this model has embeds": {"prompt_token_ids": [1], "features": [Feature("image", 0, 1, random_embeds(1))]},
    "overlap": {"prompt_token_ids": [1, 2, 3], "features": bad()["features"] + bad(1)["features"]},
    "must be a Feature": {"prompt_token_ids": [1], "features": [{"kind": "embeds"}]},
    "must be a list of Feature": {"prompt_token_ids": [1], "features": "x"},
    "prompt_token_ids, which the prompt lacks": {"prompt": "a", "features": bad()["features"]},
    "whole prompt": {"prompt_token_ids": [1], "prompt_embeds": random_embeds(1)},
    "tensor or an array": {"prompt_embeds": [[1.0]]},
    r"must be \[tokens, hidden size\]": {"prompt_embeds": np.ones(64, np.float32)},
    "at most 255": {"prompt_embeds": random_embeds(256)},
}


def test_wrong_embeddings_are_refused(models):
    with engine(models) as llm:
        for message, prompt in WRONG.items():
            with pytest.raises(ValueError, match=message):
                llm.generate(prompt, GREEDY, use_tqdm=False)
        for message, params in {
            "prompt_logprobs": SamplingParams(prompt_logprobs=1),
            "truncate_prompt_tokens": SamplingParams(truncate_prompt_tokens=2),
        }.items():
            with pytest.raises(ValueError, match=message):
                llm.generate(bad(), params, use_tqdm=False)
    with engine(models, enable_prompt_embeds=False) as llm, pytest.raises(ValueError, match="--enable-prompt-embeds"):
        llm.generate(bad(), GREEDY, use_tqdm=False)
