"""Drafts of rows whose logits depend on the tokens before: penalties, grammars, bad words. The text is that of single
steps, through the real engine, with any drafts."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.messages.sampling_params import ReasoningTokens
from quire.sampling_params import StructuredOutputsParams
from quire.spec_decode.draft_planner import DraftPlanner
from tests.sample.user_examples import Counting, NoRepeat
from tests.spec_decode import proposers
from tests.structured_output.model import save_model

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "ok": {"type": "boolean"},
        "n": {"type": "integer", "minimum": 10, "maximum": 999},
        "more": {"type": "array", "items": {"enum": ["yes", "no"]}, "minItems": 2, "maxItems": 3},
    },
    "required": ["name", "ok", "n", "more"],
    "additionalProperties": False,
}
FAR_APART = 0.15  # initial weights for which a token does not hang on rounding
END_ID = 307  # the model's
FORM = {"json": SCHEMA, "disable_any_whitespace": True}
KINDS: dict[str, dict[str, Any]] = {
    "free": {},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 1.2, "repetition_penalty": 1.4},
    "rewards": {"frequency_penalty": -1.5, "repetition_penalty": 0.7},
    "bias": {"logit_bias": {9: 3.0, 30: -5.0}},
    "allowed": {"allowed_token_ids": list(range(20, 60)), "repetition_penalty": 1.3},
    "min tokens": {"min_tokens": 11, "stop_token_ids": list(range(0, 300, 3))},
    "no repeat": {"extra_args": {"no_repeat": True}},
    "bad words": {"bad_words": ["a", "ab", "12", "true", "x y"], "frequency_penalty": -2.0},
    "thinking": {"thinking_token_budget": 7, "reasoning": ReasoningTokens(start=[1], end=[33, 34, 35], open=True)},
    "json": {"structured_outputs": FORM},
    "json and penalties": {"structured_outputs": FORM, "presence_penalty": 1.0, "repetition_penalty": 1.2},
    "regex": {"structured_outputs": {"regex": "([a-f]{3}-){2,5}[0-9]{4}"}},
    "long regex": {"structured_outputs": {"regex": "[a-f]*"}, "min_tokens": 9, "logit_bias": {END_ID: 50.0}},
    "choice": {"structured_outputs": {"choice": ["perhaps", "no"]}},
    "guidance": {"structured_outputs": {"regex": "[a-z ]{5,20}", "backend": "guidance"}, "bad_words": ["ab"]},
    "outlines": {"structured_outputs": {"regex": "([0-9]{2}:){3,6}[a-z]+", "backend": "outlines"}},
    "enforcer": {"structured_outputs": {"regex": "(ab|ba){2,9}!", "backend": "lm-format-enforcer"}},
    "reasoning": {
        "structured_outputs": FORM,
        "reasoning": ReasoningTokens(start=[1], end=[33, 34], open=True),
        "thinking_token_budget": 5,
    },
}

LIBRARIES = {"guidance": "llguidance", "outlines": "outlines_core", "enforcer": "lmformatenforcer"}
KINDS = {kind: given for kind, given in KINDS.items() if kind not in LIBRARIES or find_spec(LIBRARIES[kind])}


def params(kind: str, temperature: float) -> SamplingParams:
    wanted = {"temperature": temperature, "seed": len(kind), "max_tokens": 48} | KINDS[kind]
    if "structured_outputs" in wanted:
        wanted["structured_outputs"] = StructuredOutputsParams(**wanted["structured_outputs"])
    return SamplingParams(**wanted)


REQUESTS = [(kind, temperature) for kind in KINDS for temperature in (0.0, 1.3)]
PROMPTS = [{"prompt_token_ids": [40 + i, 50, 60, *range(70, 70 + i)]} for i in range(len(REQUESTS))]


@dataclass
class Run:
    outputs: list[Any]
    num_steps: int


def generate(model: str, depth: int = 1, **options: Any) -> Run:
    asynchronous = {"async_depth": depth} if depth else {"async_scheduling": False}
    options = {"num_gpu_blocks_override": 400, "max_num_seqs": 64, "cpu_threads": 1} | asynchronous | options
    options = {"logits_processors": [NoRepeat], "spec_adaptive": False} | options
    with LLM(model, dtype="float32", max_model_len=128, use_tqdm_on_load=False, **options) as llm:
        found = llm.generate(PROMPTS, [params(*request) for request in REQUESTS], use_tqdm=False)
        core = llm.llm_engine.client.core
        assert not core.grammars.active and core.scheduler.kv.pool.num_free == core.scheduler.kv.pool.num_blocks
        return Run([one.outputs[0] for one in found], sum(core.scheduler.stats().step_tokens))


def drafting(method: str, count: int) -> dict[str, Any]:
    return {"method": f"tests.spec_decode.proposers:{method}", "num_speculative_tokens": count}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(Path(tmp_path_factory.mktemp("model")), FAR_APART)


@pytest.fixture(scope="module")
def single(model: str) -> Iterator[Run]:
    """One token a step; right drafts come from its texts."""
    run = generate(model)
    texts = [[*prompt["prompt_token_ids"], *one.token_ids] for prompt, one in zip(PROMPTS, run.outputs, strict=True)]
    proposers.KNOWN[:] = texts
    yield run
    proposers.KNOWN.clear()


def check(run: Run, single: Run) -> None:
    for request, one, wanted in zip(REQUESTS, run.outputs, single.outputs, strict=True):
        assert list(one.token_ids) == list(wanted.token_ids), request
        assert (one.text, one.finish_reason, one.stop_reason) == (wanted.text, wanted.finish_reason, wanted.stop_reason)


def test_what_single_steps_write(single: Run) -> None:
    """The requests are what they claim to be: otherwise equal texts would prove little."""
    by_kind = {request: one for request, one in zip(REQUESTS, single.outputs, strict=True)}
    for temperature in (0.0, 1.3):
        free = by_kind["free", temperature].token_ids
        assert all(by_kind[kind, temperature].token_ids != free for kind in ("penalties", "rewards", "bias"))
        unrepeated = by_kind["no repeat", temperature].token_ids
        assert len(set(unrepeated)) == len(unrepeated)
        assert len(by_kind["min tokens", temperature].token_ids) >= 11
        assert list(by_kind["thinking", temperature].token_ids)[7:10] == [33, 34, 35]
        assert len(by_kind["long regex", temperature].token_ids) == 9 + 1
        assert by_kind["reasoning", temperature].text.count('{"name": "') == 1
        assert by_kind["choice", temperature].text in ("perhaps", "no")
        for kind in ("json", "json and penalties"):
            one = by_kind[kind, temperature]
            assert one.finish_reason == "length" or json.loads(one.text).keys() == SCHEMA["properties"].keys()


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_half_right_drafts_at_any_depth(model: str, single: Run, depth: int) -> None:
    run = generate(model, depth, speculative_config=drafting("HalfRight", 3))
    check(run, single)


@pytest.mark.parametrize(("method", "count"), [("Fixed", 2), ("Random", 4), ("HalfRight", 1), ("Right", 8)])
def test_drafts_of_any_worth(model: str, single: Run, method: str, count: int) -> None:
    check(generate(model, speculative_config=drafting(method, count)), single)


def test_right_drafts_are_accepted_in_every_row(model: str, single: Run) -> None:
    """No row goes a token at a time: that of the most tokens would need as many steps."""
    run = generate(model, speculative_config=drafting("Right", 4))
    check(run, single)
    assert run.num_steps < single.num_steps / 2 < 48


def test_preempted_and_chunked(model: str, single: Run) -> None:
    options = {"num_gpu_blocks_override": 14, "block_size": 16, "max_num_batched_tokens": 16, "max_num_seqs": 6}
    check(generate(model, speculative_config=drafting("HalfRight", 3), **options), single)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_proposer_that_rests_in_between(model: str, single: Run, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks are for the drafts that are verified, though these are what an earlier proposal left."""
    plan, calls = DraftPlanner.plan, itertools.count()

    def rest(planner: DraftPlanner, *given: Any) -> Any:
        return None if next(calls) % 3 == 2 else plan(planner, *given)

    monkeypatch.setattr(DraftPlanner, "plan", rest)
    check(generate(model, depth, speculative_config=drafting("HalfRight", 3)), single)
    check(generate(model, depth, speculative_config=drafting("Right", 4)), single)


def test_logits_processors_must_support_drafts(model: str) -> None:
    with pytest.raises(ValueError, match=r"user_examples:Counting .*supports_drafts = True"):
        generate(model, speculative_config=drafting("Fixed", 2), logits_processors=[NoRepeat, Counting])
