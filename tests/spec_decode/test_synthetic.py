"""The numbers that textbooks give for an acceptance rate of 0.8 and five drafts, counted by the engine."""

import numpy as np
import pytest

from quire import LLM, SamplingParams
from tests.spec_decode import proposers
from tests.spec_decode.counting import count_verified, reached
from tests.tiny_models import save_tiny

PROMPTS = [[3 + i, 5, 7, 2 * i] for i in range(48)]
TARGET_MS, DRAFT_MS = 10, 1  # of a step of the target, and of a draft
PARAMS = SamplingParams(temperature=0.9, seed=3, max_tokens=250, ignore_eos=True)


def texts(model, **options):
    options = {"max_num_seqs": 48, "max_model_len": 300, "dtype": "float32", "skip_tokenizer_init": True} | options
    with LLM(model, use_tqdm_on_load=False, **options) as llm:
        found = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], PARAMS, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in found]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    model = tmp_path_factory.mktemp("model")
    save_tiny("llama", model, num_hidden_layers=1)
    return str(model)


def test_five_drafts_of_which_each_is_right_with_probability_0_8(tiny, monkeypatch):
    wanted = texts(tiny)
    monkeypatch.setattr(proposers, "KNOWN", [[*ids, *text] for ids, text in zip(PROMPTS, wanted, strict=True)])
    verified = count_verified(monkeypatch, num_drafts=5)
    config = {"method": "tests.spec_decode.proposers:Synthetic", "num_speculative_tokens": 5}
    assert texts(tiny, speculative_config=config, spec_adaptive=False) == wanted

    accepted = np.asarray(verified.accepted)
    for count in range(5):
        assert np.mean(accepted == count) == pytest.approx(0.8**count * 0.2, abs=0.02)
        assert reached(verified.accepted, count) == pytest.approx(0.8, abs=0.03)
    assert np.mean(accepted == 5) == pytest.approx(0.8**5, abs=0.02)
    # (1 - a^(k + 1)) / (1 - a) tokens a step: the drafts accepted, and one more.
    tokens = float(np.mean(accepted + 1))
    assert tokens == pytest.approx(3.69, abs=0.1)
    # 10 tokens: 100 ms one by one; else 15 ms for each round of five drafts and a step.
    speedup = 10 * TARGET_MS / (10 / tokens * (5 * DRAFT_MS + TARGET_MS))
    assert speedup == pytest.approx(2.46, abs=0.07)
