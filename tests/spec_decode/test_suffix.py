"""Suffix decoding through the engine: the same text, in fewer steps where it was written before."""

import pytest

from quire import SamplingParams
from quire.kernels.native.build import library
from quire.spec_decode.suffix import SuffixProposer
from tests.spec_decode.lookup_texts import OPTIONS, accepted, engine, texts, texts_once  # noqa: F401
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.skipif(library() is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    model = tmp_path_factory.mktemp("model")
    save_tiny("llama", model)
    return str(model)


@pytest.fixture(scope="module")
def reference(tiny):
    return texts_once(tiny)


def suffix(count, **keys):
    return {
        "method": "suffix",
        "num_speculative_tokens": count,
        **{f"suffix_decoding_{key}": value for key, value in keys.items()},
    }


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_text_is_that_of_one_token_a_step(tiny, reference, options):
    """The second time with drafts of the first."""
    llm = engine(tiny, speculative_config=suffix(5, min_token_prob=0.0), **options)
    try:
        assert texts(llm) == reference
        assert texts(llm) == reference
    finally:
        llm.shutdown()


class Copying(SuffixProposer):
    """With a copy of the rows on the host, as on a GPU."""

    def __init__(self, config, device) -> None:
        super().__init__(config, device)
        self._copies_rows = True


@pytest.mark.parametrize("name", ["default", "preempted"])
def test_rows_that_are_copied_to_the_host(tiny, reference, accepted, name):  # noqa: F811
    config = suffix(5) | {"method": f"{__name__}:{Copying.__name__}"}
    llm = engine(tiny, speculative_config=config, **OPTIONS[name])
    try:
        assert texts(llm) == reference
        assert texts(llm) == reference
    finally:
        llm.shutdown()
    assert accepted[6] > 10, accepted


def sampled(seed, count=50):
    """A text that does not repeat itself, so that only an earlier one foresees it."""
    return SamplingParams(temperature=1.5, seed=seed, max_tokens=count, ignore_eos=True)


def test_outputs_are_shared_with_requests_of_the_same_salt(tiny, accepted):  # noqa: F811
    llm = engine(tiny, speculative_config=suffix(8))

    def steps_of(salt) -> int:
        """How many steps the same random text takes."""
        accepted.clear()
        prompt = {"prompt_token_ids": [5, 6, 7]} | ({"cache_salt": salt} if salt else {})
        llm.generate([prompt], sampled(3), use_tqdm=False)
        return sum(count for tokens, count in accepted.items() if tokens)

    try:
        assert steps_of("mine") > 40
        assert steps_of("mine") < 20
        assert steps_of("yours") > 40
        assert steps_of(None) > 40
        assert steps_of(None) < 20
    finally:
        llm.shutdown()


def test_nothing_is_shared_where_no_request_is_cached(tiny, accepted):  # noqa: F811
    llm = engine(tiny, speculative_config=suffix(8, max_cached_requests=0))
    try:
        for _ in range(2):
            accepted.clear()
            texts(llm, [[5, 6, 7]], sampled(3))
            assert sum(accepted[n] for n in accepted if n) > 40
    finally:
        llm.shutdown()


def test_drafts_are_accepted_where_the_text_repeats(tiny, accepted):  # noqa: F811
    llm = engine(tiny, speculative_config=suffix(8))
    try:
        params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
        (text,) = texts(llm, [[9] * 20], params)
    finally:
        llm.shutdown()
    assert len(text) == 90
    assert accepted[9] > 3, accepted
