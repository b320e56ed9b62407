"""Ranks that share every layer write what one rank writes: one of them samples, and the others' rows advance alike.

A run has an engine of some settings and requests of many kinds, as those of tests/spec_decode/test_matrix.py. Settings
meet pairwise over the runs of `make tp-matrix`; otherwise there is one of every method of speculation.
"""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from quire import LLM, SamplingParams
from tests.models import transformers_sweep
from tests.quantization.fp8_checkpoints import block_fp8
from tests.quantization.int_checkpoints import gptq, save_checkpoints
from tests.spec_decode import proposers
from tests.spec_decode.matrix_models import Models
from tests.spec_decode.pairwise import pairwise
from tests.spec_decode.test_matrix import (
    BLOCKS,
    KINDS,
    describe,
    engine_options,
    generate,
    possible_engine,
    same_logprobs,
)
from tests.tiny_models import save_tiny

THREADS = {
    2: "tests.executor.threads:ThreadsExecutor",
    3: "tests.executor.threads:ThreeThreads",
    4: "tests.executor.threads:FourThreads",
}
AXES = {
    "method": ("Random", "ngram", "suffix", "draft_model", "medusa", "eagle", "HelpedEagle3", "mtp"),
    "family": ("llama", "qwen3", "gemma3", "mixtral"),
    "ranks": (2, 4),
    "num_drafts": (1, 3),
    "depth": (0, 1),
    "chunked": (False, True),
    "prefix_caching": (False, True),
    "preempted": (False, True),
    "policy": ("fcfs",),
    "adaptive": (False,),
}
ALL_RUNS = pairwise(AXES, possible_engine)
RUN_ALL = os.environ.get("QUIRE_TP_MATRIX") == "all"
# Otherwise one of every method of which there is no other like it, with two ranks rather than four.
FEW = ("Random", "ngram", "draft_model", "medusa", "HelpedEagle3", "mtp")
SORTED_RUNS = sorted(ALL_RUNS, key=lambda run: run["ranks"])
RUNS = ALL_RUNS if RUN_ALL else [next(r for r in SORTED_RUNS if r["method"] == method) for method in FEW]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp)


@pytest.fixture(scope="module")
def singles(models: Models) -> Callable[[str], list[Any]]:
    """By family: what one rank writes a token at a time."""
    return cache(lambda family: generate(models.target(family)))


@pytest.mark.parametrize("run", RUNS, ids=describe)
def test_drafts_are_verified_together(
    run: dict[str, Any], models: Models, singles: Callable[[str], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = singles(run["family"])
    texts = [[*kind["prompt"], *one.token_ids] for kind, of in zip(KINDS, wanted, strict=True) for one in of]
    monkeypatch.setattr(proposers, "KNOWN", texts)
    # Layers of a rank may be of other sizes, and so in more groups, each of which needs blocks.
    enough = {"num_gpu_blocks_override": 2 * BLOCKS, "distributed_executor_backend": THREADS[run["ranks"]]}
    options = enough | engine_options(run, models)
    found = generate(models.target(run["family"], run["method"]), **options)
    for kind, ours, theirs in zip(KINDS, found, wanted, strict=True):
        for one, single in zip(ours, theirs, strict=True):
            assert list(one.token_ids) == list(single.token_ids), kind
            assert one.finish_reason == single.finish_reason, kind
            assert same_logprobs(one.logprobs, single.logprobs), kind


class CountsCalls:
    """A user's logits processor; raises for the request that asks for it."""

    changes_argmax = True
    active = True
    supports_drafts = True
    made: ClassVar[list["CountsCalls"]] = []

    def __init__(self, config: Any, device: Any) -> None:
        self.calls = 0
        self.args: dict[int, dict[str, Any]] = {}
        self.made.append(self)

    def add_row(self, new: Any) -> None:
        self.args[new.row] = new.params.extra_args or {}
        if "in add_row" in self.args[new.row]:
            raise RuntimeError("no such row")

    def remove_row(self, row: int) -> None:
        self.args.pop(row, None)

    def apply(self, logits: Any, batch: Any) -> Any:
        self.calls += 1
        if any("in apply" in args for args in self.args.values()):
            raise RuntimeError("no such logits")
        return logits

    def sampled(self, tokens: Any, batch: Any) -> None: ...


def small_engine(model: Path, **options: Any) -> LLM:
    sizes = {"kv_cache_memory_bytes": 1 << 22, "max_model_len": 128, "max_num_seqs": 8}
    ranks = {"distributed_executor_backend": THREADS[2]}
    return LLM(str(model), dtype="float32", skip_tokenizer_init=True, **(sizes | ranks | options))


def row_states(worker: Any) -> tuple[torch.Tensor, ...]:
    rows = worker.runner.rows
    return rows.token_ids.clone(), rows.num_tokens.clone(), rows.num_computed.clone(), rows.num_found.clone()


@pytest.mark.parametrize("method", [None, "ngram", "tests.spec_decode.proposers:Random", "draft_model"])
def test_rows_of_all_ranks_agree(tmp_path: Path, method: str | None) -> None:
    """Drafts of a draft model are drawn too."""
    save_tiny("llama", tmp_path)
    given: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "draft_model":
        given |= {"model": str(tmp_path), "draft_sample_method": "probabilistic"}
    drafts = {} if method is None else {"speculative_config": given, "spec_adaptive": False}
    with small_engine(tmp_path, **drafts) as llm:
        params = SamplingParams(temperature=1.0, seed=4, max_tokens=20, repetition_penalty=1.2)
        llm.generate([{"prompt_token_ids": [5, 6, 7] * n} for n in (1, 4, 9)], params, use_tqdm=False)
        first, *others = llm.collective_rpc(row_states)
    assert first[1].count_nonzero() == 3
    for other in others:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, other, strict=True))


def test_a_failing_logits_processor_fails_its_step_alone(tmp_path: Path) -> None:
    """In processes, where a step that fails on some ranks only would end the engine."""
    save_tiny("llama", tmp_path)
    prompt = {"prompt_token_ids": [5, 6, 7]}
    ranks = {"distributed_executor_backend": None, "tensor_parallel_size": 2}
    with small_engine(tmp_path, logits_processors=[f"{__name__}:CountsCalls"], **ranks) as llm:
        for place in ("in add_row", "in apply"):
            failing = SamplingParams(temperature=0, max_tokens=6, extra_args={place: True})
            (failed,) = llm.generate([prompt], failing, use_tqdm=False)
            assert failed.outputs[0].finish_reason == "error" and "no such" in failed.error
        (well,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False)
    assert len(well.outputs[0].token_ids) == 6


def test_logits_processors_of_users_run_on_the_rank_that_samples(tmp_path: Path) -> None:
    """If one raises, the step fails and the others do not wait for it."""
    save_tiny("llama", tmp_path)
    CountsCalls.made.clear()
    prompt = {"prompt_token_ids": [5, 6, 7]}
    drafts = {"spec_method": "tests.spec_decode.proposers:Random", "spec_tokens": 2, "spec_adaptive": False}
    with small_engine(tmp_path, logits_processors=[CountsCalls], **drafts) as llm:
        (made,) = CountsCalls.made
        plain = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        (wanted,) = llm.generate([prompt], plain, use_tqdm=False)
        assert made.calls > 0
        for place in ("in add_row", "in apply"):
            failing = SamplingParams(temperature=0, max_tokens=6, extra_args={place: True})
            (failed,) = llm.generate([prompt], failing, use_tqdm=False)
            assert failed.outputs[0].finish_reason == "error" and "no such" in failed.error
            (again,) = llm.generate([prompt], plain, use_tqdm=False)
            assert again.outputs[0].token_ids == wanted.outputs[0].token_ids


def plain_texts(model: str | None, **options: Any) -> list[list[int]]:
    """Greedy ones, and a seeded one of a prompt in two chunks."""
    sizes = {"kv_cache_memory_bytes": 1 << 22, "max_model_len": 128, "max_num_batched_tokens": 32}
    fixed = {"dtype": "float32", "skip_tokenizer_init": True}
    prompts = [[5, 6, 7], [*range(3, 50)], [109, 110, 105, 106, 107] * 4]
    params = [SamplingParams(temperature=t, seed=3, max_tokens=12, ignore_eos=True) for t in (0, 0.8, 0)]
    with LLM(model, **(fixed | sizes | options)) as llm:
        found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in found]


@pytest.mark.parametrize(
    ("family", "ranks"),
    [("gpt2", 2), ("qwen3-moe", 4), ("olmo2", 4), ("cohere-qk-norm", 2), ("gpt-oss", 2), ("glm4-moe-air", 2)],
)
def test_families(tmp_path: Path, family: str, ranks: int) -> None:
    """Transposed weights, experts, norms over all heads or by head, KV heads that are repeated, sinks."""
    save_tiny(family, tmp_path)
    shared = plain_texts(str(tmp_path), distributed_executor_backend=THREADS[ranks])
    assert shared == plain_texts(str(tmp_path))


@pytest.mark.parametrize("made", [gptq(shuffled=True), block_fp8()], ids=["gptq", "fp8"])
def test_quantized_weights(tmp_path: Path, made: Any) -> None:
    """Dequantized, as kernels may round inputs by groups that ranks split."""
    model, _ = save_checkpoints("llama", tmp_path, made, intermediate_size=128)
    given = {"quantization": "dequantized"}
    shared = plain_texts(str(model), **given, distributed_executor_backend=THREADS[4])
    assert shared == plain_texts(str(model), **given)


@pytest.mark.parametrize("model_type", ["exaone4", "phi3", "nemotron", "qwen2_moe"])
def test_a_model_that_transformers_runs(tmp_path: Path, model_type: str) -> None:
    """With norms, by gathered outputs, without a gate, and with experts."""
    transformers_sweep.save(model_type, tmp_path)
    given = {"model_impl": "transformers"}
    shared = plain_texts(str(tmp_path), **given, distributed_executor_backend=THREADS[2])
    assert shared == plain_texts(str(tmp_path), **given)


@pytest.mark.parametrize(
    ("model_type", "ranks", "message"),
    [
        ("stablelm", 2, "transformers has no plan to share it among 2 workers; use one"),
        ("deepseek_v2", 2, "needs mla_kv_a_proj; allowed are colwise"),
        ("exaone4", 4, r"KV heads \(2\) cannot be divided among 4 .*; it allows 1, 2"),
    ],
)
def test_plans_that_are_refused(tmp_path: Path, model_type: str, ranks: int, message: str) -> None:
    transformers_sweep.save(model_type, tmp_path)
    with pytest.raises(ValueError, match=message):
        plain_texts(str(tmp_path), model_impl="transformers", distributed_executor_backend=THREADS[ranks])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "inner", "ranks", "message"),
    [
        (6, 3, 96, 4, r"attention heads \(6\) cannot be divided among 4 .* allows 1, 2, 3, 6"),
        (6, 2, 96, 3, r"KV heads \(2\) cannot be repeated on 3 .* a multiple of 2"),
        (8, 8, 90, 4, r"output features \(90\) cannot be divided among 4 .* allows 1, 2, 3, 5"),
    ],
)
def test_sizes_that_do_not_divide(
    tmp_path: Path, heads: int, kv_heads: int, inner: int, ranks: int, message: str
) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": inner}
    save_tiny("llama", tmp_path, hidden_size=48, **sizes)
    with pytest.raises(ValueError, match=message):
        plain_texts(str(tmp_path), distributed_executor_backend=THREADS[ranks])


def test_three_ranks_of_smollm2() -> None:
    """Nine heads and three KV heads."""
    given = {"quantization": "dequantized", "kv_cache_memory_bytes": 1 << 26}
    assert plain_texts(None, **given, tensor_parallel_size=3) == plain_texts(None, **given)


@pytest.mark.parametrize("method", ["draft_model", "eagle3"] if RUN_ALL else ["eagle3"])
def test_in_processes(method: str, models: Models, singles: Callable[[str], list[Any]]) -> None:
    """Without drafts: test_rank_matrix.py."""
    options = models.options("llama", method, 2) | {"spec_adaptive": False}
    found = generate(models.target("llama", method), tensor_parallel_size=2, **options)
    for kind, ours, theirs in zip(KINDS, found, singles("llama"), strict=True):
        for one, single in zip(ours, theirs, strict=True):
            assert list(one.token_ids) == list(single.token_ids), kind
            assert same_logprobs(one.logprobs, single.logprobs), kind
