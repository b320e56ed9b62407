"""EAGLE heads through the real engine: the text of a run without them, and the very drafts that plain torch computes
from the target's hidden states, whatever the batching, chunking and caching."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire import LLM, SamplingParams
from tests.spec_decode import heads
from tests.tiny_models import save_tiny

SHARED = list(range(40, 80))
PROMPTS = [[5, 6, 7], [*SHARED, 3], [9] * 20, [4, 8, 15, 16, 23, 42], [*SHARED, 9, 9]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=17, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1.2, top_k=20, top_p=0.9, seed=5, max_tokens=30, repetition_penalty=1.3),
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "synchronous": {"async_scheduling": False},
    "chunked": {"max_num_batched_tokens": 16, "block_size": 8},
    "preempted": {"num_gpu_blocks_override": 10, "block_size": 16, "enable_prefix_caching": False},
    "few rows": {"max_num_seqs": 2, "block_size": 8},
    "deep": {"async_depth": 2, "enable_prefix_caching": False},
}
SAVED = {
    "eagle": lambda folder: heads.save_eagle1(folder),
    "eagle-speculators": lambda folder: heads.save_eagle1(folder, speculators=True, bias=False),
    "eagle3": lambda folder: heads.save_eagle3(folder),
    "eagle3-speculators": lambda folder: heads.save_eagle3(folder, speculators=True),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def models(folder: Path):
    """By name, each saved once."""

    @cache
    def saved(name: str) -> str:
        place = folder / name
        place.mkdir()
        if name in SAVED:
            return SAVED[name](place)
        save_tiny(name, place)
        return str(place)

    return saved


@pytest.fixture(scope="module")
def singles(models):
    """Texts of each target without drafts."""
    return cache(lambda target: generate(models(target)))


def core_of(llm: LLM) -> Any:
    return llm.llm_engine.client.core


def generate(model: str, head: dict[str, Any] | None = None, rounds: int = 1, **options: Any) -> list[list[int]]:
    """The texts; of the last round, where there are several that hit the prefix cache."""
    options = {"speculative_config": head, "max_model_len": 128, "cpu_threads": 1, "dtype": "float32"} | options
    options = {"spec_adaptive": False} | options
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    with LLM(model, skip_tokenizer_init=True, use_tqdm_on_load=False, **options) as llm:
        for _ in range(rounds):
            found = llm.generate(prompts, PARAMS, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in found]


def method(head: str, saved: str, count: int = 3) -> dict[str, Any]:
    """Noting what it proposes."""
    name = "NotingEagle3" if head.startswith("eagle3") else "NotingEagle"
    return {"method": f"tests.spec_decode.heads:{name}", "model": saved, "num_speculative_tokens": count}


def check_drafts(target: str, head: str, count: int) -> None:
    """The first `count` of every other proposal."""
    assert len(heads.PROPOSED) > 30
    reference = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    embed, unembed = reference.get_input_embeddings(), reference.get_output_embeddings()
    longest = {}  # of the states of a longer text those of its beginnings are a part
    for known, _ in sorted(heads.PROPOSED, key=lambda one: -len(one[0])):
        if not any(text[: len(known)] == list(known) for text in longest.values()):
            longest[tuple(known)] = list(known)
    states = {}
    with torch.inference_mode():
        for key, text in longest.items():
            out = reference.model(torch.tensor([text]), output_hidden_states=True)
            eagle3 = Path(head).name.startswith("eagle3")
            aux = [out.hidden_states[i] for i in (2, 2, 1)] if eagle3 else [out.last_hidden_state]
            states[key] = torch.cat([state[0] for state in aux], -1)
        for known, drafts in heads.PROPOSED[::2]:
            key = next(key for key, text in longest.items() if text[: len(known)] == known)
            heads.check_eagle_drafts(head, known, states[key][: len(known) - 1], embed, unembed, drafts[:count])


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("head", ["eagle", "eagle3"])
def test_text_and_drafts(models, singles, head: str, kind: str) -> None:
    heads.PROPOSED.clear()
    found = generate(models("llama"), method(head, models(head)), **OPTIONS[kind])
    assert found == singles("llama")
    # Where blocks are short there are none for the passes after the first, whose drafts are then worse.
    check_drafts(models("llama"), models(head), 1 if kind == "preempted" else 3)


@pytest.mark.parametrize("target", ["gemma3", "qwen3"])
@pytest.mark.parametrize("head", ["eagle3", "eagle-speculators"])
def test_other_targets(models, singles, head: str, target: str) -> None:
    """Windows, several cache groups and heads of other sizes than the target's."""
    heads.PROPOSED.clear()
    found = generate(models(target), method(head, models(head), 2), max_num_batched_tokens=16, block_size=8)
    assert found == singles(target)
    check_drafts(models(target), models(head), 2)


@pytest.mark.parametrize("head", ["eagle-speculators", "eagle3-speculators"])
def test_checkpoints_of_the_speculators_library(models, singles, head: str) -> None:
    heads.PROPOSED.clear()
    assert generate(models("llama"), method(head, models(head))) == singles("llama")
    check_drafts(models("llama"), models(head), 3)


def test_passes_as_they_are_captured(models, singles) -> None:
    heads.PROPOSED.clear()
    head = method("eagle3", models("eagle3")) | {"method": "tests.spec_decode.heads:NotingEagle3InGraphs"}
    assert generate(models("llama"), head, async_scheduling=False) == singles("llama")
    check_drafts(models("llama"), models("eagle3"), 3)


@pytest.mark.parametrize("head", ["eagle", "eagle3"])
def test_prefix_hits(models, singles, head: str) -> None:
    """The second round finds all prompts in the cache, but for the block that the head needs hidden states of."""
    heads.PROPOSED.clear()
    assert generate(models("llama"), method(head, models(head)), rounds=2, block_size=8) == singles("llama")
    check_drafts(models("llama"), models(head), 3)


@pytest.mark.parametrize(("name", "head"), [("eagle", "eagle"), ("eagle3", "eagle3-speculators")])
def test_bf16_by_name(models, name: str, head: str) -> None:
    """The target's steps are replayed, hidden states included."""
    config = {"method": name, "model": models(head), "num_speculative_tokens": 4}
    with LLM(models("llama"), skip_tokenizer_init=True, dtype="bfloat16", speculative_config=config) as llm:
        found = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], PARAMS, use_tqdm=False)
        recorded = core_of(llm).executor.worker.runner.recorded
        assert recorded is None or recorded.replays > 0
    texts = [list(one.outputs[0].token_ids) for one in found]
    assert texts == generate(models("llama"), dtype="bfloat16")


def test_replayed_passes_give_the_same_drafts(models) -> None:
    """In bf16, on a CPU that our kernels serve: whatever a pass has of torch's own runs without replay."""
    found, replays = [], 0
    for name in ("NotingEagle3", "NotingEagle3Unrecorded"):
        heads.PROPOSED.clear()
        head = method("eagle3", models("eagle3")) | {"method": f"tests.spec_decode.heads:{name}"}
        options = {"dtype": "bfloat16", "async_scheduling": False, "speculative_config": head, "spec_adaptive": False}
        with LLM(models("llama"), skip_tokenizer_init=True, **options) as llm:
            llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], PARAMS, use_tqdm=False)
            runner = core_of(llm).executor.worker.runner
            if runner.recorded is None:
                pytest.skip("nothing is replayed here")
            if runner.proposer.recorded is not None:
                replays = runner.proposer.recorded.replays
        found.append(list(heads.PROPOSED))
    assert found[0] == found[1] and replays > 0


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"vocab_size": 99}, "a head of another model"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "from 1 to the target's 4"),
        ({"draft_vocab_size": 95}, r"lm_head.weight has shape \[96, 64\].*must be \[95, 64\]"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "has unknown fc.weight"),
        ({"hidden_size": 32}, "cannot share the target's embedding"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings is 'long'; it must be a whole number"),
    ],
)
def test_heads_that_do_not_fit(tmp_path, models, keys: dict[str, Any], message: str) -> None:
    saved = heads.save_eagle3(tmp_path, **keys)
    with pytest.raises(ValueError, match=message):
        generate(models("llama"), {"method": "eagle3", "model": saved, "num_speculative_tokens": 2})


def test_a_head_with_numbers_that_are_none(tmp_path, models) -> None:
    saved = heads.save_eagle3(tmp_path)
    tensors = torch.load(tmp_path / "pytorch_model.bin")
    tensors["fc.weight"][3, 5] = float("nan")
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"fc.weight has infinite numbers or NaN; all must be finite"):
        generate(models("llama"), {"method": "eagle3", "model": saved, "num_speculative_tokens": 2})
