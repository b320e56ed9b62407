"""A smaller model proposes the drafts: the text is the target's, and what it finds right is accepted."""

import itertools
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.kernels import native
from tests.tiny_models import save_tiny

K = 3
PROMPTS = [[5, 6, 7], list(range(3, 60)), [9] * 20, [4, 8, 15, 16, 23, 42], [4, 8, 15, 16, 23, 42, *range(60, 75)], [3]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=37, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=41, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1.2, top_k=20, top_p=0.9, seed=5, max_tokens=30, repetition_penalty=1.3),
    SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
    SamplingParams(temperature=0.5, seed=8, max_tokens=26, n=3),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "synchronous": {"async_scheduling": False},
    "depth 2": {"async_depth": 2},
    "chunked": {"max_num_batched_tokens": 16, "block_size": 8},
    "preempted": {"num_gpu_blocks_override": 9, "block_size": 16},
    "adaptive": {"spec_adaptive": True},
    "few rows": {"enable_prefix_caching": False, "max_num_seqs": 2},
}


@dataclass
class Run:
    texts: list[list[int]]
    reasons: list[str | None]
    num_steps: int
    num_preemptions: int
    num_replays: int  # of the draft
    groups: list[int]  # layers of each, ascending


def generate(target: str, draft: str | None = None, prompts: Any = None, params: Any = None, **options: Any) -> Run:
    keys = {"num_speculative_tokens": K} | options.pop("keys", {})
    if draft is not None:
        options["speculative_config"] = {"method": "draft_model", "model": draft} | keys
        options = {"spec_adaptive": False} | options
    options = {"max_model_len": 128, "dtype": "float32", "num_gpu_blocks_override": 200} | options
    with LLM(target, skip_tokenizer_init=True, cpu_threads=1, use_tqdm_on_load=False, **options) as llm:
        given = [{"prompt_token_ids": ids} for ids in prompts or PROMPTS]
        found = llm.generate(given, params or PARAMS, use_tqdm=False)
        core = llm.llm_engine.client.core
        pool = core.scheduler.kv.pool
        assert pool.num_free == pool.num_blocks
        stats = core.scheduler.stats()
        one = [each for output in found for each in output.outputs]
        return Run(
            [list(each.token_ids) for each in one],
            [each.finish_reason for each in one],
            sum(stats.step_tokens),
            stats.num_preemptions,
            recorded.replays if (recorded := getattr(core.executor.worker.proposer, "recorded", None)) else 0,
            sorted(Counter(layer.group for layer in core.executor.worker.cache_layers).values()),
        )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = Path(tmp_path_factory.mktemp("models"))
    found = {"target": ("llama", {}), "gemma3": ("gemma3", {}), "small": ("llama", {"num_hidden_layers": 1})}
    found["other heads"] = ("llama", {"num_hidden_layers": 2, "num_key_value_heads": 1})
    found["windows"] = ("mistral", {"num_hidden_layers": 2})
    found["short"] = ("llama", {"max_position_embeddings": 64})
    found["other tokens"] = ("llama", {"vocab_size": 212})
    for name, (family, changes) in found.items():
        save_tiny(family, folder / name, **changes)
    return {name: str(folder / name) for name in found}


@pytest.fixture(scope="module")
def alone(models: dict[str, str]) -> dict[str, Run]:
    """Without drafts."""
    return {name: generate(models[name]) for name in ("target", "gemma3")}


def check(run: Run, alone: Run) -> None:
    assert run.texts == alone.texts
    assert run.reasons == alone.reasons


@pytest.mark.parametrize("name", OPTIONS)
def test_the_text_is_the_targets(models: dict[str, str], alone: dict[str, Run], name: str) -> None:
    run = generate(models["target"], models["small"], **OPTIONS[name])
    check(run, alone["target"])
    assert (run.num_preemptions > 0) == (name == "preempted")


@pytest.mark.parametrize("draft", ["other heads", "windows", "target"])
@pytest.mark.parametrize("target", ["target", "gemma3"])
def test_any_draft_for_any_target(models: dict[str, str], alone: dict[str, Run], target: str, draft: str) -> None:
    check(generate(models[target], models[draft], max_num_batched_tokens=24, block_size=8), alone[target])


def test_layers_of_equal_pages_share_the_targets_blocks(models: dict[str, str]) -> None:
    assert generate(models["target"], models["small"]).groups == [5]
    assert generate(models["target"], models["other heads"]).groups == [2, 2, 2]


@pytest.mark.parametrize("name", ["synchronous", "chunked", "few rows"])
def test_the_target_as_its_own_draft_is_always_right(models: dict[str, str], name: str) -> None:
    """Every step but the last adds all drafts and one more."""
    length = 1 + 9 * (K + 1)
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    options = OPTIONS[name] | {"async_scheduling": False}
    for prompt in ([7], list(range(3, 19)), list(range(3, 50))):
        run = generate(models["target"], models["target"], [prompt], params, **options)
        chunks = -(-len(prompt) // options.get("max_num_batched_tokens", 512))
        assert run.num_steps == chunks + 9


def test_accepted_after_a_prefix_hit_and_in_forks(models: dict[str, str]) -> None:
    """Blocks found in the cache have the draft's keys too, as have those that children share with the first."""
    params = SamplingParams(top_k=1, max_tokens=1 + 5 * (K + 1), ignore_eos=True, n=2)
    prompts = [list(range(3, 60))] * 3
    options = {"async_scheduling": False, "block_size": 8, "max_num_seqs": 2}
    run = generate(models["target"], models["target"], prompts, params, **options)
    assert run.texts == generate(models["target"], None, prompts, params, **options).texts
    assert run.num_steps <= 3 * (2 + 5 + 1)


def test_seeded_draws_accept_what_the_draft_foresees(models: dict[str, str]) -> None:
    params = SamplingParams(temperature=0.3, seed=1, max_tokens=48, ignore_eos=True)
    run = generate(models["target"], models["target"], [[5, 6, 7]], params, async_scheduling=False)
    assert run.texts == generate(models["target"], None, [[5, 6, 7]], params).texts
    assert run.num_steps < 40


def test_drawn_drafts_of_the_target_itself_are_always_right(models: dict[str, str]) -> None:
    """p equals q, at any temperature."""
    params = SamplingParams(temperature=1.3, seed=1, max_tokens=1 + 9 * (K + 1), ignore_eos=True)
    options = {"async_scheduling": False, "keys": {"draft_sample_method": "probabilistic"}}
    run = generate(models["target"], models["target"], [[5, 6, 7]], params, **options)
    assert run.num_steps == 1 + 9


@pytest.mark.parametrize("max_tokens", [16, 512])
def test_what_it_was_left_out_of_is_computed_later(models: dict[str, str], max_tokens: int) -> None:
    """Steps without drafts are not its business; with drafts again, all are right once it has caught up."""
    config = {"method": "draft_model", "model": models["target"], "num_speculative_tokens": K}
    options = {"max_model_len": 128, "dtype": "float32", "num_gpu_blocks_override": 100, "async_scheduling": False}
    options |= {"max_num_seqs": 4, "max_num_batched_tokens": max_tokens, "cpu_threads": 1, "spec_adaptive": False}
    prompt, params = {"prompt_token_ids": PROMPTS[1]}, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with LLM(models["target"], skip_tokenizer_init=True, speculative_config=config, **options) as llm:
        engine, counts = llm.llm_engine, []
        scheduler = engine.client.core.scheduler
        scheduler.num_drafts = 0
        engine.add_request("a", prompt, params)
        while engine.has_unfinished_requests():
            counts += [len(output.outputs[0].token_ids) for output in engine.step()]
            if counts and counts[-1] == 21:
                scheduler.num_drafts = K
    gained = [after - before for before, after in itertools.pairwise(counts)]
    assert gained[:20] == [1] * 20 and counts[-1] == 60
    assert gained[-6:-1] == [K + 1] * 5


@pytest.mark.parametrize(("draft", "rests"), [("small", True), ("windows", False), ("gemma3", False)])
def test_only_a_draft_that_keeps_all_blocks_can_catch_up(models: dict[str, str], draft: str, rests: bool) -> None:
    """Behind a window they may be others' by then."""
    config = {"method": "draft_model", "model": models[draft], "num_speculative_tokens": K}
    options = {"max_model_len": 128, "dtype": "float32", "num_gpu_blocks_override": 100, "cpu_threads": 1}
    with LLM(models["target"], skip_tokenizer_init=True, speculative_config=config, **options) as llm:
        assert llm.llm_engine.client.core.executor.worker.proposer.rests == rests


def test_limits(models: dict[str, str]) -> None:
    """Rows that end at max_model_len, and those longer than the draft knows positions for."""
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    prompts = [[5, 6, 7], list(range(3, 90)), list(range(3, 66))]
    wanted = generate(models["target"], None, prompts, params)
    assert wanted.reasons == ["length"] * 3
    for draft, keys in (("target", {}), ("short", {}), ("small", {"max_model_len": 40})):
        for k in (1, 5):
            keys = {**keys, "num_speculative_tokens": k}
            check(generate(models["target"], models[draft], prompts, params, keys=keys, block_size=8), wanted)


def test_bfloat16_is_replayed(models: dict[str, str]) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    run = generate(models["target"], models["target"], [[5, 6, 7]], params, dtype="bfloat16", async_scheduling=False)
    assert run.num_steps < 20
    if native.library() is not None:
        assert run.num_replays >= K * (run.num_steps - 1)


def test_other_vocabularies_are_refused(models: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"vocabulary of 212 tokens, the model that it drafts for one of 211"):
        generate(models["target"], models["other tokens"])
