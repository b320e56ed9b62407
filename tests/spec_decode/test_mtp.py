"""Multi-token prediction by a tiny model: the text of a run without, and the drafts that plain torch computes."""

from typing import Any

import pytest
import torch
import transformers

from tests.spec_decode import heads, mtp_model, test_eagle
from tests.tiny_models import save_tiny

OVERRIDES = {"model_class_overrides": {"LlamaWithMTP": "tests.spec_decode.mtp_model:LlamaWithMTP"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return mtp_model.save_mtp(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 16, "block_size": 8}], ids=["default", "chunked"])
def test_text_and_drafts(model: str, options: dict[str, Any]) -> None:
    heads.PROPOSED.clear()
    method = {"method": "tests.spec_decode.mtp_model:NotingMTP", "num_speculative_tokens": 2}
    found = test_eagle.generate(model, method, **options, **OVERRIDES)
    assert found == test_eagle.generate(model, **OVERRIDES)
    assert len(heads.PROPOSED) > 30
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for known, drafts in heads.PROPOSED[::3]:
        with torch.inference_mode():
            states = reference.model(torch.tensor([known[:-1]])).last_hidden_state[0]
            assert drafts == mtp_model.mtp_drafts(model, known, states, 2), len(known)


def test_models_without_such_layers(tmp_path) -> None:
    save_tiny("llama", tmp_path)
    with pytest.raises(ValueError, match="'mtp' needs a model whose checkpoint has layers for it"):
        test_eagle.generate(str(tmp_path), {"method": "mtp", "num_speculative_tokens": 2})
