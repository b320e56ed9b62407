"""Whole engines under grammars: every form of output, next to free requests, at any depth of asynchrony."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest

from quire import LLM, SamplingParams
from quire.engine.outputs import RequestOutput
from quire.sampling_params import RequestOutputKind, StructuredOutputsParams
from tests.structured_output.cases import POINT, SCHEMAS
from tests.structured_output.model import END

PROMPT = {"prompt_token_ids": [40, 50, 60, 70, 80]}
FREE = SamplingParams(temperature=0, max_tokens=24)
# Random models write strings and whitespace without end, so only what must end soon.
BOUNDED = [
    "boolean",
    "null",
    "lengths",
    "pattern and length",
    "date",
    "uuid",
    "integer range",
    "integer exclusive",
    "const",
    "enum",
    "typed enum",
    "one of",
    "all of",
    "pattern with any character",
]
REGEXES = [r"[a-f]{3}\d{2}", r"(ab){2,3}|x", r".{4}", r"[^a-z\n]{2,5}"]
CHOICE = ["yes", "no", "perhaps"]


def engine(tiny: str, depth: int = 1, **options: Any) -> LLM:
    options = {"num_gpu_blocks_override": 400, "max_num_seqs": 32} | options
    asynchronous = {"async_depth": depth} if depth else {"async_scheduling": False}
    return LLM(tiny, dtype="float32", max_model_len=256, use_tqdm_on_load=False, **asynchronous, **options)


@pytest.fixture(scope="module")
def llm(tiny: str) -> Iterator[LLM]:
    with engine(tiny) as one:
        yield one


def params(seed: int = 0, max_tokens: int = 200, **wanted: Any) -> SamplingParams:
    given = {name: wanted.pop(name) for name in list(wanted) if name in SamplingParams.__struct_fields__}
    form = StructuredOutputsParams(**wanted)
    return SamplingParams(
        **{"temperature": 1.5, "seed": seed, "max_tokens": max_tokens} | given, structured_outputs=form
    )


def run(llm: LLM, wanted: list[SamplingParams]) -> list[RequestOutput]:
    return llm.generate([PROMPT] * len(wanted), wanted, use_tqdm=False)


def mixture() -> list[tuple[SamplingParams, Callable[[str], object]]]:
    """Requests of many forms, each with the check that its text must pass."""
    validate = jsonschema.Draft202012Validator
    found: list[tuple[SamplingParams, Callable[[str], object]]] = []
    for name in BOUNDED:
        wanted = params(len(found), json=SCHEMAS[name], disable_any_whitespace=True)
        found.append((wanted, lambda text, name=name: validate(SCHEMAS[name]).is_valid(json.loads(text))))
    for regex in REGEXES:
        found.append((params(len(found), regex=regex), lambda text, regex=regex: re.fullmatch(regex, text)))
    found.append((params(len(found), choice=CHOICE), lambda text: text in CHOICE))
    found.append((params(len(found), grammar='root ::= "<" [a-c]{2} ">"'), lambda t: re.fullmatch("<[a-c]{2}>", t)))
    found.append((params(len(found), regex="[ab]{2}c", temperature=0), lambda text: re.fullmatch("[ab]{2}c", text)))
    return found


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_batch_of_forms_beside_free_requests(tiny: str, depth: int) -> None:
    wanted = mixture()
    with engine(tiny, depth) as llm:
        alone = run(llm, [FREE])[0].outputs[0].token_ids
        outputs = run(llm, [p for pair in wanted for p in (pair[0], FREE)])
        again = run(llm, [p for p, _ in wanted])
        assert not llm.llm_engine.client.core.grammars.active
    for (asked, fits), output, repeated in zip(wanted, outputs[::2], again, strict=True):
        [completion] = output.outputs
        assert output.error is None and completion.finish_reason == "stop"
        assert fits(completion.text), (asked.structured_outputs, completion.text)
        assert repeated.outputs[0].token_ids == completion.token_ids
    assert all(output.outputs[0].token_ids == alone for output in outputs[1::2])


def test_every_completion_of_n_has_a_state_of_its_own(llm: LLM) -> None:
    [output] = run(llm, [params(3, regex="[a-h]{12}", n=5)])
    texts = {completion.text for completion in output.outputs}
    assert len(texts) == 5 and all(re.fullmatch("[a-h]{12}", text) for text in texts)


def test_preempted_requests_resume_their_grammar(tiny: str, llm: LLM) -> None:
    wanted = [params(seed, regex="([a-d][0-9]){30}") for seed in range(6)]
    expected = [output.outputs[0].token_ids for output in run(llm, wanted)]
    with engine(tiny, num_gpu_blocks_override=18, max_num_seqs=6) as small:
        found = [output.outputs[0].token_ids for output in run(small, wanted)]
        assert small.llm_engine.client.core.scheduler.num_preemptions > 0
    assert found == expected


def test_with_logprobs_penalties_and_bias(llm: LLM) -> None:
    wanted = params(1, regex="[a-d]{8}", logprobs=2, frequency_penalty=1.0, logit_bias={66: 5.0}, top_k=3, min_p=0.01)
    [output] = run(llm, [wanted])
    assert re.fullmatch("[a-d]{8}", output.outputs[0].text)
    assert len(output.outputs[0].logprobs) == len(output.outputs[0].token_ids)


def test_limits_and_ends(llm: LLM) -> None:
    [end] = llm.llm_engine.tokenizer.encode(END, add_special_tokens=False)
    outputs = run(
        llm,
        [
            params(1, regex="a*", min_tokens=6, max_tokens=40),
            params(2, regex="ab", min_tokens=30),
            params(3, choice=["a", "b"], ignore_eos=True),
            params(4, regex="[a-z]{50}", max_tokens=7),
            params(5, regex="[a-c]{5}STOP[a-c]{50}", stop=["STOP"]),
            params(6, regex="[a-c]{9}", logit_bias={end: 100.0}),
            params(7, regex="[a-c]{4}x+", stop=["x"], include_stop_str_in_output=True),
            params(8, regex="x[a-c]{20}", stop=["x", "b"], min_tokens=4),
        ],
    )
    longer, forced, ends, cut, stopped, eager, shown, late = (output.outputs[0] for output in outputs)
    assert len(longer.token_ids) >= 6 and re.fullmatch("a*", longer.text)
    assert forced.text == "ab" and forced.finish_reason == "stop"  # the grammar leaves nothing else
    assert ends.text in ("a", "b") and ends.finish_reason == "stop"
    assert len(cut.token_ids) == 7 and cut.finish_reason == "length"
    assert re.fullmatch("[a-c]{5}", stopped.text) and stopped.finish_reason == "stop"
    assert re.fullmatch("[a-c]{9}", eager.text) and eager.finish_reason == "stop"
    assert re.fullmatch("[a-c]{4}x", shown.text) and shown.finish_reason == "stop"
    assert late.text.startswith("x") and len(late.token_ids) > 4  # stop strings count after min_tokens


def test_an_invalid_schema_raises_before_anything_is_generated(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = steps_of(llm, monkeypatch)
    with pytest.raises(ValueError, match=r"prompt 1: structured_outputs: .*strnig"):
        run(llm, [FREE, params(json={"type": "strnig"}), params(json=SCHEMAS["enum"])])
    assert len(steps) == 1 and not llm.llm_engine.has_unfinished_requests()


def test_an_invalid_schema_fails_only_its_request(llm: LLM) -> None:
    named = {"wrong": params(json={"type": "strnig"}), "right": params(regex="[a-c]{3}"), "free": FREE}
    for name, wanted in named.items():
        llm.llm_engine.add_request(name, PROMPT, wanted.replace(output_kind=RequestOutputKind.FINAL_ONLY))
    ended = step_until(llm, lambda: not llm.llm_engine.has_unfinished_requests())
    outputs = {output.request_id: output for output in ended}
    wrong = outputs["wrong"]
    assert wrong.outputs[0].finish_reason == "error" and "strnig" in wrong.error
    assert outputs["right"].error is None and outputs["free"].error is None


def test_a_plain_install_serves_structured_output(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.structured_output.backends.registry.installed", lambda name: name == "guidance")
    wanted = [params(1, json=SCHEMAS["enum"]), params(2, regex="plain[a-c]{3}"), params(3, choice=["left", "right"])]
    one, two, three = (output.outputs[0].text for output in run(llm, wanted))
    assert json.loads(one) in SCHEMAS["enum"]["enum"]
    assert re.fullmatch("plain[a-c]{3}", two) and three in ("left", "right")


class Gate:
    """Holds the compilers back until it is opened."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        compiler = llm.llm_engine.client.core.grammars.compiler
        self.open = threading.Event()
        self.entered = threading.Event()
        original = compiler._compile

        def held(spec: StructuredOutputsParams) -> Any:
            self.entered.set()
            assert self.open.wait(30)
            return original(spec)

        monkeypatch.setattr(compiler, "_compile", held)


def step_until(llm: LLM, done: Callable[[], object]) -> list[RequestOutput]:
    found, end = [], time.monotonic() + 30
    while not done():
        assert time.monotonic() < end, "it did not come"
        found += llm.llm_engine.step()
    return found


def test_requests_do_not_wait_for_other_grammars(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, core = Gate(llm, monkeypatch), llm.llm_engine.client.core
    llm.llm_engine.add_request("slow", PROMPT, params(regex="never[a-z]seen"))
    assert len(run(llm, [FREE])[0].outputs[0].token_ids) == FREE.max_tokens
    assert core.scheduler.requests["slow"].state.name == "WAITING_GRAMMAR"
    gate.open.set()
    outputs = step_until(llm, lambda: not llm.llm_engine.has_unfinished_requests())
    assert re.fullmatch("never[a-z]seen", outputs[-1].outputs[0].text)


def steps_of(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """Which requests got a token, step by step."""
    core, found = llm.llm_engine.client.core, []
    original = core.step

    def step() -> Any:
        outputs = original()
        found.append(set() if outputs is None else set(outputs.index.tolist()))
        return outputs

    monkeypatch.setattr(core, "step", step)
    return found


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_no_step_is_lost_to_a_compiler(tiny: str, monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    """A request gets a token in every step while others' grammars compile: a large one, and one that takes for ever."""
    properties = {f"property_{i}": SCHEMAS["nested"] if i % 9 == 0 else {"type": "string"} for i in range(200)}
    large = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    with engine(tiny, depth) as llm:
        core = llm.llm_engine.client.core
        run(llm, [params(regex="a"), params(regex="(?i)b")])  # libraries are imported
        compiler, slow = core.grammars.compiler, threading.Event()
        original = compiler._compile
        monkeypatch.setattr(
            compiler, "_compile", lambda spec: slow.wait(60) and original(spec) if spec.regex else original(spec)
        )
        steps = steps_of(llm, monkeypatch)
        llm.llm_engine.add_request("free", PROMPT, FREE.replace(max_tokens=200))
        [free] = [request.core.index for request in core.scheduler.requests.values()]
        step_until(llm, lambda: any(free in step for step in steps))
        first = len(steps)
        llm.llm_engine.add_request("large", PROMPT, params(json=large, max_tokens=20))
        llm.llm_engine.add_request("slow", PROMPT, params(regex="ne[a-z]er", max_tokens=20))
        step_until(llm, lambda: "free" not in core.scheduler.requests)
        assert core.scheduler.requests["slow"].state.name == "WAITING_GRAMMAR"
        last = max(at for at, step in enumerate(steps) if free in step)
        assert all(free in step for step in steps[first : last + 1])
        slow.set()
        step_until(llm, lambda: not llm.llm_engine.has_unfinished_requests())


def test_aborting_while_it_compiles(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, core = Gate(llm, monkeypatch), llm.llm_engine.client.core
    wanted = params(regex="abort[a-z]ed", n=3)
    llm.llm_engine.add_request("gone", PROMPT, wanted)
    step_until(llm, gate.entered.is_set)
    llm.llm_engine.abort_request("gone")
    assert not core.scheduler.requests and not core.has_unfinished()
    gate.open.set()
    [output] = run(llm, [wanted])  # the same grammar, which the first request left behind
    assert all(re.fullmatch("abort[a-z]ed", completion.text) for completion in output.outputs)
    assert not core.grammars.pending and not core.grammars.active


def test_the_first_of_n_may_be_aborted_while_the_grammar_compiles(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, core = Gate(llm, monkeypatch), llm.llm_engine.client.core
    llm.llm_engine.add_request("n", PROMPT, params(regex="sib[a-z]ling", n=2))
    step_until(llm, gate.entered.is_set)
    core.finish_requests(["n"])
    [other] = core.scheduler.requests.values()
    assert other.state.name == "WAITING_GRAMMAR"
    gate.open.set()
    step_until(llm, lambda: not core.has_unfinished())
    llm.llm_engine.abort_request("n")


def test_a_compile_has_a_time_limit(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(tiny, structured_outputs_compile_seconds=0.05) as llm:
        gate, core = Gate(llm, monkeypatch), llm.llm_engine.client.core
        for regex in ("slow", "slower"):
            with pytest.raises(ValueError, match=r"more than 0.05 seconds"):
                run(llm, [FREE, params(regex=regex)])
        assert core.grammars.compiler.num_stuck == 2
        with pytest.raises(ValueError, match="all compiler threads are busy"):
            run(llm, [params(regex="next")])
        assert not core.has_unfinished()
        gate.open.set()
        step_until(llm, lambda: core.grammars.compiler.collect() is not None and not core.grammars.compiler.num_stuck)
        assert run(llm, [params(regex="slow")])[0].outputs[0].text == "slow"


def test_reasoning_is_unconstrained_and_the_output_is_not(llm: LLM) -> None:
    from quire.sampling_params import ReasoningTokens

    end = llm.llm_engine.tokenizer.encode("12", add_special_tokens=False)
    assert len(end) == 1
    wanted = params(regex="[a-c]{4}", max_tokens=250, logit_bias={end[0]: 3.0})
    reasoning = ReasoningTokens(start=end, end=end, open=True)
    [output] = run(llm, [wanted.replace(reasoning=reasoning)])
    tokens = output.outputs[0].token_ids
    answer = llm.llm_engine.tokenizer.decode(tokens[tokens.index(end[0]) + 1 :])
    assert re.fullmatch("[a-c]{4}", answer) and tokens.index(end[0]) > 0


def test_objects_close(llm: LLM) -> None:
    wanted = params(json=POINT, disable_any_whitespace=True, max_tokens=240, logit_bias={90: 8.0, 11: 8.0})
    outputs = run(llm, [wanted.replace(seed=seed) for seed in range(8)])
    whole = [o.outputs[0].text for o in outputs if o.outputs[0].finish_reason == "stop"]
    assert whole
    for text in whole:
        jsonschema.validate(json.loads(text), POINT)


def test_a_resumed_request_goes_on_within_its_grammar(llm: LLM) -> None:
    wanted = params(seed=4, regex=r"[a-f]{3}\d{12}")
    (whole,) = llm.generate(PROMPT, wanted, use_tqdm=False)
    begun = whole.outputs[0].token_ids[:4]
    (resumed,) = llm.generate({**PROMPT, "output_token_ids": begun}, wanted, use_tqdm=False)
    assert resumed.outputs[0].token_ids == whole.outputs[0].token_ids
    assert resumed.outputs[0].text == whole.outputs[0].text
    with pytest.raises(ValueError, match="does not fit the grammar"):
        llm.generate({**PROMPT, "output_token_ids": begun[:2] * 3}, wanted, use_tqdm=False)
