"""Grammars begin where reasoning ends."""

import re
from collections.abc import Iterator

import pytest

from quire import LLM, SamplingParams
from quire.messages.sampling_params import ReasoningTokens
from quire.messages.structured import StructuredOutputsParams
from quire.structured_output.reasoning_gate import ReasoningGate
from tests.structured_output.model import END, save_model

TEXTS = {1: b"<", 2: b"/b", 3: b">", 4: b">\n", 5: b"x", 9: b"<b>"}


def gate(open: bool | None, start: tuple[int, ...] = (9,)) -> ReasoningGate:
    return ReasoningGate(ReasoningTokens(start=list(start), end=[1, 2, 3], open=open), TEXTS.__getitem__)


def count_consumed(one: ReasoningGate, tokens: list[int]) -> int:
    """How many tokens are not the grammar's."""
    return sum(one.consumes(token) for token in tokens)


def test_inside_until_the_end_tag_however_it_is_spelled() -> None:
    assert count_consumed(gate(True), [5, 1, 1, 2, 3, 5, 5]) == 5
    assert count_consumed(gate(True), [5, 1, 2, 4, 5]) == 4
    assert count_consumed(gate(True), [5, 1, 2, 5]) == 4


def test_the_model_may_begin_to_reason() -> None:
    one = gate(None)
    assert one.start == 9 and not one.inside
    assert count_consumed(one, [9, 5, 1, 2, 3, 5]) == 5
    one = gate(None)
    assert count_consumed(one, [5, 9, 5]) == 0 and one.start is None


def test_no_reasoning() -> None:
    assert gate(False).start is None and count_consumed(gate(False), [9, 5]) == 0
    assert gate(None, start=(1, 5)).start is None  # its first token may begin an answer


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    one = LLM(save_model(tmp_path_factory.mktemp("model")), dtype="float32", max_model_len=128)
    yield one
    one.shutdown()


@pytest.mark.parametrize("open", [True, None])
def test_output_after_the_reasoning_matches(llm: LLM, open: bool | None) -> None:
    tokenizer = llm.get_tokenizer()
    (start,), (end,) = (tokenizer.encode(text, add_special_tokens=False) for text in ('{"', "\n\n"))
    params = [
        SamplingParams(
            temperature=1.5,
            seed=seed,
            max_tokens=60,
            logit_bias={start: 100.0} if open is None and seed % 2 else None,
            thinking_token_budget=6,
            reasoning=ReasoningTokens(start=[start], end=[end], open=open),
            structured_outputs=StructuredOutputsParams(regex="(yes|no){3}"),
        )
        for seed in range(24)
    ]
    thought = 0
    for one, output in zip(params, llm.generate(["ab"] * len(params), params), strict=True):
        (completion,) = output.outputs
        ids = completion.token_ids
        answer = ids
        if open or ids[0] == start:
            thought += 1
            at = ids.index(end)
            assert at <= 6 + (open is None)
            answer = ids[at + 1 :]
        assert re.fullmatch("(yes|no){3}", tokenizer.decode(answer, skip_special_tokens=True)), (one.seed, ids)
        assert completion.finish_reason == "stop"
    assert thought == len(params) if open else 0 < thought < len(params)


def test_output_cannot_end_within_the_reasoning(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    (start,), (end,) = (tokenizer.encode(text, add_special_tokens=False) for text in ('{"', "\n\n"))
    params = SamplingParams(
        temperature=0,
        max_tokens=40,
        logit_bias={tokenizer.special_id(END) or 0: 100.0},
        thinking_token_budget=6,
        reasoning=ReasoningTokens(start=[start], end=[end], open=True),
        structured_outputs=StructuredOutputsParams(regex="yes"),
    )
    ids = llm.generate("ab", params)[0].outputs[0].token_ids
    assert tokenizer.decode(ids[ids.index(end) + 1 :], skip_special_tokens=True) == "yes"


def test_no_stop_token_before_min_tokens_within_the_reasoning(llm: LLM) -> None:
    (end,) = llm.get_tokenizer().encode("\n\n", add_special_tokens=False)
    params = SamplingParams(
        temperature=0,
        max_tokens=20,
        min_tokens=9,
        stop_token_ids=[5],
        logit_bias={5: 100.0},
        reasoning=ReasoningTokens(start=[6], end=[end], open=True),
        structured_outputs=StructuredOutputsParams(regex="(yes|no){3}"),
    )
    ids = llm.generate(["ab"], params)[0].outputs[0].token_ids
    assert list(ids).index(5) == 9
