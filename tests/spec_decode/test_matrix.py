"""Proposers under combinations of everything else: texts and logprobs are those of one token a step, in float32.

A run has an engine of some settings and requests of many kinds; settings of the engine meet pairwise over the runs,
those of requests within each. A new proposer is a line of METHODS (matrix_models.py). `make spec-matrix` has all runs,
otherwise one of every method.
"""

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.messages.sampling_params import ReasoningTokens
from quire.sampling_params import StructuredOutputsParams
from tests.spec_decode import proposers
from tests.spec_decode.matrix_models import METHODS, Models
from tests.spec_decode.pairwise import pairwise

FAMILIES = ("llama", "mistral", "qwen3", "gemma3", "mixtral")
ENGINES = {
    "method": list(METHODS),
    "family": FAMILIES,
    "num_drafts": (1, 3, 5),
    "depth": (0, 1, 2),
    "chunked": (False, True),
    "prefix_caching": (False, True),
    "preempted": (False, True),
    "policy": ("fcfs", "priority"),
    "adaptive": (False, True),
}
FORM = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
NONE: dict[str, Any] = {}
REQUESTS: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 1.1),
    "filters": (NONE, {"top_k": 20, "top_p": 0.9}, {"min_p": 0.1}),
    "penalties": (
        NONE,
        {"presence_penalty": 0.5, "frequency_penalty": 1.2, "repetition_penalty": 1.4},
        {"frequency_penalty": -1.0, "repetition_penalty": 0.8},
    ),
    "logprobs": (NONE, {"logprobs": 2}),
    "form": (
        NONE,
        {"structured_outputs": {"json": FORM}},
        {"structured_outputs": {"regex": "([a-f]{2}-){2,6}[0-9]+"}},
    ),
    "stop": (NONE, {"stop": ["-a", "7", "e1"]}, {"stop": ["}", "rue"], "include_stop_str_in_output": True}),
    "n": (NONE, {"n": 2}),
    "min_tokens": (NONE, {"min_tokens": 9, "stop_token_ids": list(range(0, 300, 19))}),
    "budget": (
        NONE,
        {"thinking_token_budget": 6, "reasoning": ReasoningTokens(start=[1], end=[33, 34], open=True)},
    ),
    "edits": (NONE, {"logit_bias": {9: 3.0, 30: -5.0}}, {"bad_words": ["ab", "12", "tr", "x y"]}),
    "prompt": ([40, 50, 60], [*range(40, 70)], [*range(40, 66), 7, 8, 9]),  # the last two have a prefix in common
}
MAX_TOKENS = 40
# With these seeds no draw of the five families is decided by rounding: logits differ by 3e-6 between steps of other
# shapes, and no token is within 1e-5 of the threshold of min-p, top-k or top-p, nor a number within 1e-6 of another's.
FIRST_SEED = 1100
RUN_ALL = os.environ.get("QUIRE_SPEC_MATRIX") == "all"
BLOCKS = 400  # enough for all requests at a time


def possible(request: dict[str, Any]) -> bool:
    greedy = request.get("temperature") == 0.0
    return not (greedy and (request.get("n") or request.get("filters")))


def possible_engine(run: dict[str, Any]) -> bool:
    """Prediction layers are a part of the target's checkpoint, and refused where it has none: only our Llama has."""
    return run.get("method") != "mtp" or run.get("family", "llama") == "llama"


def first_of_each(runs: list[dict[str, Any]], axis: str) -> list[dict[str, Any]]:
    return [next(run for run in runs if run[axis] == value) for value in ENGINES[axis]]


ALL_RUNS = pairwise(ENGINES, possible_engine)
RUNS = ALL_RUNS if RUN_ALL else first_of_each(ALL_RUNS, "method")
KINDS = pairwise(REQUESTS, possible)


def params(kind: dict[str, Any], seed: int) -> SamplingParams:
    given = {"temperature": kind["temperature"], "seed": seed, "max_tokens": MAX_TOKENS}
    for name, values in kind.items():
        if name not in ("temperature", "prompt"):
            given |= values
    if "structured_outputs" in given:
        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
    return SamplingParams(**given)


def generate(model: str, **options: Any) -> list[Any]:
    """The completions of each kind of request."""
    options = {"num_gpu_blocks_override": BLOCKS, "max_num_seqs": 48, "cpu_threads": 1, "block_size": 8} | options
    with LLM(model, dtype="float32", max_model_len=96, use_tqdm_on_load=False, **options) as llm:
        prompts = [{"prompt_token_ids": kind["prompt"]} for kind in KINDS]
        wanted = [params(kind, seed) for seed, kind in enumerate(KINDS, FIRST_SEED)]
        priority = [i % 3 for i in range(len(KINDS))] if options.get("scheduling_policy") == "priority" else None
        outputs = llm.generate(prompts, wanted, use_tqdm=False, priority=priority)
        core = llm.llm_engine.client.core
        assert not core.grammars.active and core.scheduler.kv.pool.num_free == core.scheduler.kv.pool.num_blocks
        assert (core.scheduler.num_preemptions > 0) == (options["num_gpu_blocks_override"] < BLOCKS)
    return [one.outputs for one in outputs]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp)


@pytest.fixture(scope="module")
def singles(models: Models) -> Callable[[str], list[Any]]:
    """By family: what it writes a token at a time."""
    return cache(lambda family: generate(models.target(family)))


def engine_options(run: dict[str, Any], models: Models) -> dict[str, Any]:
    options = {
        "enable_prefix_caching": run["prefix_caching"],
        "scheduling_policy": run["policy"],
        "spec_adaptive": run["adaptive"],
    }
    options |= models.options(run["family"], run["method"], run["num_drafts"])
    options |= {"async_depth": run["depth"]} if run["depth"] else {"async_scheduling": False}
    if run["chunked"]:
        options["max_num_batched_tokens"] = 16
    if run["preempted"]:
        options |= {"num_gpu_blocks_override": few_blocks(run), "max_num_seqs": 8}
    return options


def few_blocks(run: dict[str, Any]) -> int:
    """Enough for one request and not for two, which needs blocks of every group of layers."""
    eagle, windows = "eagle" in run["method"].lower(), run["family"] == "gemma3"
    if (eagle and run["family"] in ("mistral", "qwen3")) or (windows and (eagle or run["method"] == "draft_model")):
        return 80  # its layers are groups of their own
    return 60 if windows else 16


def same_logprobs(one: Any, wanted: Any) -> bool:
    if wanted is None:
        return one is None
    return [list(entry) for entry in one] == [list(entry) for entry in wanted] and all(
        entry[token].logprob == pytest.approx(of.logprob, abs=2e-3)
        for entry, others in zip(one, wanted, strict=True)
        for token, of in others.items()
    )


def describe(run: dict[str, Any]) -> str:
    return "-".join(name if value is True else f"{name}={value}" for name, value in run.items() if value is not False)


@pytest.mark.parametrize("run", RUNS, ids=describe)
def test_texts_are_those_of_one_token_a_step(
    run: dict[str, Any], models: Models, singles: Callable[[str], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, wanted = models.target(run["family"], run["method"]), singles(run["family"])
    texts = [[*kind["prompt"], *one.token_ids] for kind, of in zip(KINDS, wanted, strict=True) for one in of]
    monkeypatch.setattr(proposers, "KNOWN", texts)
    for kind, found, expected in zip(KINDS, generate(model, **engine_options(run, models)), wanted, strict=True):
        for one, single in zip(found, expected, strict=True):
            assert list(one.token_ids) == list(single.token_ids), kind
            assert (one.text, one.finish_reason) == (single.text, single.finish_reason), kind
            assert one.stop_reason == single.stop_reason, kind
            assert same_logprobs(one.logprobs, single.logprobs), kind


def test_any_two_settings_meet() -> None:
    for axes, found, allowed in ((ENGINES, ALL_RUNS, possible_engine), (REQUESTS, KINDS, possible)):
        for a in axes:
            for b in axes:
                if a < b:
                    pairs = [{a: x, b: y} for x in axes[a] for y in axes[b] if allowed({a: x, b: y})]
                    assert all(any(pair.items() <= one.items() for one in found) for pair in pairs)


def test_the_part_has_every_setting() -> None:
    assert all(any(run[name] == value for run in RUNS) for name, values in ENGINES.items() for value in values)
