"""Prompts that repeat themselves, and the text of an engine with and without proposers that look drafts up."""

from collections import Counter

import pytest

from quire import LLM, SamplingParams
from quire.worker import verification

PROMPTS = [
    [5, 6, 7, 8, 9, 10] * 5,
    list(range(3, 40)),
    [9] * 20,
    [4, 8, 15, 16, 23, 42, 4, 8, 15, 16],
    [*range(60, 75), *range(60, 64)],
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=17, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=33, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1.2, top_k=20, top_p=0.9, seed=5, max_tokens=30, repetition_penalty=1.3),
    SamplingParams(temperature=0.2, seed=8, max_tokens=50, ignore_eos=True),
]
OPTIONS = {
    "default": {},
    "synchronous": {"async_scheduling": False},
    "chunked": {"max_num_batched_tokens": 16, "block_size": 8},
    "preempted": {"num_gpu_blocks_override": 9, "block_size": 16},
    "few rows": {"enable_prefix_caching": False, "max_num_seqs": 2},
}


def engine(model, **options) -> LLM:
    options = {"spec_adaptive": False} | options  # what is counted is with all drafts
    return LLM(model, skip_tokenizer_init=True, max_model_len=128, dtype="float32", **options)


def texts(llm: LLM, prompts=PROMPTS, params=PARAMS) -> list[list[int]]:
    found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in found]


def texts_once(model, **options) -> list[list[int]]:
    llm = engine(model, **options)
    try:
        return texts(llm)
    finally:
        llm.shutdown()


@pytest.fixture
def accepted(monkeypatch) -> Counter:
    """How many tokens the rows of steps kept: {1: rows that kept one, 2: ...}."""
    counts: Counter = Counter()
    verify = verification.accept_drafts

    def counted(*arguments):
        verify(*arguments)
        counts.update(arguments[-1].tolist())

    monkeypatch.setattr(verification, "accept_drafts", counted)
    return counts
