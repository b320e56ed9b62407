"""Medusa heads through the real engine: the text of a run without them, and the drafts that plain torch computes."""

from typing import Any

import pytest
import torch
import transformers

from quire import LLM, SamplingParams
from tests.spec_decode import heads
from tests.tiny_models import save_tiny

PROMPTS = [[5, 6, 7], list(range(3, 40)), [9] * 20, [4, 8, 15, 16, 23, 42], list(range(3, 50))]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=17, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1.2, top_k=20, top_p=0.9, seed=5, max_tokens=30, repetition_penalty=1.3),
    SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "synchronous": {"async_scheduling": False},
    "chunked": {"max_num_batched_tokens": 16, "block_size": 8},
    "preempted": {"block_size": 16},
    "few rows": {"enable_prefix_caching": False, "max_num_seqs": 2},
}


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def target(request, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, folder)
    return str(folder)


@pytest.fixture(scope="module")
def single(target: str) -> list[list[int]]:
    return texts(target)


@pytest.fixture(scope="module")
def medusa(tmp_path_factory) -> str:
    return heads.save_medusa(tmp_path_factory.mktemp("heads"), hidden=64, vocab=211)


def texts(model: str, head: dict[str, Any] | None = None, dtype: str = "float32", **options: Any) -> list[list[int]]:
    options = {"speculative_config": head, "max_model_len": 128, "cpu_threads": 1, "spec_adaptive": False} | options
    with LLM(model, skip_tokenizer_init=True, dtype=dtype, use_tqdm_on_load=False, **options) as llm:
        found = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], PARAMS, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in found]


@pytest.mark.parametrize("kind", OPTIONS)
def test_text_and_drafts(target: str, single: list[list[int]], medusa: str, kind: str) -> None:
    heads.PROPOSED.clear()
    options = OPTIONS[kind]
    if kind == "preempted":
        options = options | {"num_gpu_blocks_override": 34 if "gemma3" in target else 9}
    method = {"method": "tests.spec_decode.heads:NotingMedusa", "model": medusa, "num_speculative_tokens": 3}
    assert texts(target, method, **options) == single
    assert len(heads.PROPOSED) > 30
    reference = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    tensors = torch.load(f"{medusa}/medusa_lm_head.pt", weights_only=True)
    for known, drafts in heads.PROPOSED[::3]:
        with torch.inference_mode():
            states = reference.model(torch.tensor([known])).last_hidden_state[0]
        assert drafts == heads.medusa_drafts(tensors, states[-2], 1), len(known)


def test_layers_in_vllm_names(tmp_path, target: str, single: list[list[int]]) -> None:
    saved = heads.save_medusa(tmp_path, 64, 211, num_heads=2, num_layers=2, names="vllm")
    head = {"method": "medusa", "model": saved, "num_speculative_tokens": 2}
    assert texts(target, head) == single
    assert texts(target, head, dtype="bfloat16") == texts(target, dtype="bfloat16")


@pytest.mark.parametrize(
    ("count", "hidden", "message"),
    [(5, 64, r"has 3 Medusa heads"), (2, 32, r"has shape \[32, 32\].*must be \[64, 64\]")],
)
def test_heads_that_do_not_fit(tmp_path, target: str, count: int, hidden: int, message: str) -> None:
    saved = heads.save_medusa(tmp_path, hidden, 211)
    with pytest.raises(ValueError, match=message):
        texts(target, {"method": "medusa", "model": saved, "num_speculative_tokens": count})


def test_models_through_transformers_are_refused(target: str, medusa: str) -> None:
    head = {"method": "medusa", "model": medusa, "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match="reads hidden states, which"):
        texts(target, head, model_impl="transformers")
