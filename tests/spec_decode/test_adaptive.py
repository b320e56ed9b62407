"""Adaptive drafts through the real engine: step costs measured at start-up, and the same text whatever they were."""

from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.messages.speculation import DraftProfile
from tests.spec_decode import proposers
from tests.spec_decode.test_several_tokens import PARAMS, PROMPTS, outputs
from tests.tiny_models import save_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    model = tmp_path_factory.mktemp("model")
    save_tiny("llama", model)
    return str(model)


@pytest.fixture(scope="module")
def reference(tiny: str) -> Iterator[list[Any]]:
    found, _ = outputs(tiny)
    proposers.KNOWN[:] = [[*prompt, *one.token_ids] for prompt, one in zip(PROMPTS, found, strict=True)]
    yield found
    proposers.KNOWN.clear()


def engine(model: str, method: str, **options: Any) -> LLM:
    options = {"spec_method": f"tests.spec_decode.proposers:{method}", "spec_tokens": 3} | options
    return LLM(model, skip_tokenizer_init=True, max_model_len=128, dtype="float32", **options)


def profile(llm: LLM) -> DraftProfile:
    found: DraftProfile = llm.collective_rpc("get_draft_profile")[0]
    return found


def test_costs_are_measured_at_start(tiny: str) -> None:
    with engine(tiny, "Fixed") as llm:
        found = profile(llm)
        assert found.plain[0][0] == 1 and [tokens for tokens, _ in found.drafted[:2]] == [2, 4]
        assert all(seconds > 0 for _, seconds in (*found.plain, *found.drafted))
        assert not found.finds and not found.sizes
        assert llm.llm_engine.client.core.scheduler.drafts.stats.num_drafts == 0
    with engine(tiny, "Fixed", spec_adaptive=False) as llm:
        assert profile(llm) == DraftProfile()


@pytest.mark.parametrize("method", ["Fixed", "HalfRight", "Finds"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_text_is_that_of_one_token_a_step(tiny: str, reference: list[Any], method: str, depth: int) -> None:
    options = {"async_depth": depth} if depth else {"async_scheduling": False}
    with engine(tiny, method, **options) as llm:
        found = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], PARAMS, use_tqdm=False)
    for one, wanted in zip(found, reference, strict=True):
        assert list(one.outputs[0].token_ids) == list(wanted.token_ids)


def test_bad_drafts_are_given_up(tiny: str) -> None:
    with engine(tiny, "Fixed") as llm:
        llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
        stats = llm.llm_engine.client.core.scheduler.drafts.stats
        assert stats.num_draft_tokens < 100 < 3 * 99
