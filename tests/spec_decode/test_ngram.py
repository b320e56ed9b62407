"""Prompt lookup through the engine: the same text in fewer steps where text repeats itself."""

import pytest

from quire import SamplingParams
from tests.spec_decode.lookup_texts import OPTIONS, accepted, engine, texts, texts_once  # noqa: F401
from tests.tiny_models import save_tiny

FAMILIES = ("llama", "qwen3", "gemma3")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    model = tmp_path_factory.mktemp("model")
    save_tiny("llama", model)
    return str(model)


@pytest.fixture(scope="module")
def reference(tiny):
    return texts_once(tiny)


def lookup(count, shortest=2, longest=4):
    return {
        "method": "ngram",
        "num_speculative_tokens": count,
        "prompt_lookup_min": shortest,
        "prompt_lookup_max": longest,
    }


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_text_is_that_of_one_token_a_step(tiny, reference, options):
    for config in (lookup(1, 1, 1), lookup(4)):
        assert texts_once(tiny, speculative_config=config, **options) == reference


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_other_families(tmp_path, family):
    save_tiny(family, tmp_path)
    model = str(tmp_path)
    assert texts_once(model, speculative_config=lookup(3)) == texts_once(model)


def test_drafts_are_accepted_where_the_text_repeats(tiny, accepted):  # noqa: F811
    """A tiny model falls into a loop, of which prompt lookup foresees every token."""
    llm = engine(tiny, speculative_config=lookup(4))
    try:
        params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
        (text,) = texts(llm, [[9] * 20], params)
    finally:
        llm.shutdown()
    assert len(text) == 90
    assert accepted[5] > 5, accepted
