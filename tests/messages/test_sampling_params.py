"""Any user input is refused with its field's name, or survives encoding to the engine."""

import contextlib
import math
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from quire.config.shown import shown
from quire.messages.checks import MAX_PLAIN_CHARACTERS, MAX_PLAIN_DEPTH, MAX_PLAIN_VALUES
from quire.messages.protocol import AddRequests, Codec, ToEngine
from quire.messages.requests import EngineCoreRequest
from quire.messages.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    ReasoningTokens,
    RequestOutputKind,
    SamplingParams,
)
from quire.messages.structured import KINDS
from tests.properties import examples

HUGE = 2**70
DEEP: dict = {}
for _ in range(MAX_PLAIN_DEPTH + 1):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("field", "given_as"),
    [
        ("min_count", {"repetition_detection": {"max_pattern_size": 2, "min_count": HUGE}}),
        ("max_pattern_size", {"repetition_detection": {"max_pattern_size": HUGE}}),
        ("repetition_detection", {"repetition_detection": {"max_pattern_size": 2, "unknown": 1}}),
        ("repetition_detection", {"repetition_detection": 3}),
        ("logprobs", {"logprobs": HUGE}),
        ("prompt_logprobs", {"prompt_logprobs": HUGE}),
        ("n", {"n": HUGE}),
        ("n", {"n": 10**5000}),  # more digits than Python prints
        ("seed", {"seed": HUGE}),
        ("top_k", {"top_k": HUGE}),
        ("temperature", {"temperature": 10**400}),  # no float
        ("top_p", {"top_p": HUGE}),
        ("max_tokens", {"max_tokens": HUGE}),
        ("min_tokens", {"min_tokens": HUGE}),
        ("thinking_token_budget", {"thinking_token_budget": HUGE}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": HUGE}),
        ("stop_token_ids", {"stop_token_ids": [HUGE]}),
        ("allowed_token_ids", {"allowed_token_ids": [HUGE]}),
        ("allowed_token_ids", {"allowed_token_ids": [1] * (MAX_ALLOWED_TOKEN_IDS + 1)}),
        ("logit_bias", {"logit_bias": {HUGE: 1.0}}),
        ("logit_bias", {"logit_bias": {5: HUGE}}),
        ("bad_words_token_ids", {"bad_words_token_ids": [[HUGE]]}),
        ("visible_token_ids", {"visible_token_ids": [HUGE]}),
        ("ignore_eos", {"ignore_eos": "yes"}),
        ("output_kind", {"output_kind": HUGE}),
        ("reasoning", {"reasoning": "qwen3"}),
        ("stop", {"stop": ["\ud800"]}),
        ("bad_words", {"bad_words": ["\udfff"]}),
        ("extra_args", {"extra_args": {"a": [{"b": HUGE}]}}),
        ("extra_args", {"extra_args": DEEP}),
        ("extra_args", {"extra_args": {"a": [0] * (MAX_PLAIN_VALUES + 1)}}),
        ("extra_args", {"extra_args": {"a": "x" * (MAX_PLAIN_CHARACTERS + 1)}}),
        ("extra_args", {"extra_args": {"a": ["x" * 1024] * 1025}}),
        ("extra_args", {"extra_args": {"\ud800": 1}}),
        ("extra_args", {"extra_args": {"a": {1: 2}}}),
        ("extra_args", {"extra_args": {"a": object()}}),
        ("structured_outputs", {"structured_outputs": {"regex": "a", "disable_fallback": HUGE}}),
        ("structured_outputs", {"structured_outputs": {"json_object": "yes"}}),
        ("structured_outputs", {"structured_outputs": {"regex": "a", "backend": HUGE}}),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(field: str, given_as: dict) -> None:
    with pytest.raises(ValueError, match=f"^{field}\\b") as error:
        SamplingParams(**given_as)
    assert len(str(error.value)) < 1000  # the message is truncated


def test_reasoning_tokens_are_bounded() -> None:
    for wrong in ({"start": [HUGE], "end": [1]}, {"start": [1], "end": [1] * 300}, {"start": [1], "end": []}):
        with pytest.raises(ValueError, match=r"^(start|end) "):
            ReasoningTokens(**wrong)
    with pytest.raises(ValueError, match=r"^open is 1"):
        ReasoningTokens(start=[1], end=[2], open=1)  # type: ignore[arg-type]


def test_values_in_errors_are_truncated() -> None:
    for value in (HUGE, 10**5000, [10**5000], "x" * 10**6, [1] * 10**6, {"a": {"b": "x" * 10**6}}):
        assert len(shown(value)) < 250


NUMBERS = st.one_of(
    st.integers(-3, 70),
    st.sampled_from([2**31 - 1, 2**31, 2**63 - 1, -(2**63), 2**63, 2**64, HUGE, 10**400, True, np.int64(3)]),
    st.floats(),
)
TEXTS = st.one_of(st.text(max_size=6), st.sampled_from(["\ud800", "a\udfff", "\0", "\U0001f600", "x" * 2000]))
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS, st.binary(max_size=3)),
    lambda below: st.one_of(st.lists(below, max_size=4), st.dictionaries(st.one_of(TEXTS, NUMBERS), below, max_size=4)),
    max_leaves=12,
)
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "stop": st.lists(TEXTS, max_size=3),
    "bad_words": st.lists(TEXTS, max_size=3),
    "stop_token_ids": st.lists(NUMBERS, max_size=4),
    "allowed_token_ids": st.lists(NUMBERS, max_size=4),
    "visible_token_ids": st.lists(NUMBERS, max_size=4),
    "bad_words_token_ids": st.lists(st.lists(NUMBERS, max_size=3), max_size=3),
    "logit_bias": st.dictionaries(NUMBERS, NUMBERS, max_size=4),
    "output_kind": st.sampled_from(list(RequestOutputKind)),
    "extra_args": st.dictionaries(TEXTS, ANYTHING, max_size=4),
    "repetition_detection": st.fixed_dictionaries(
        {"max_pattern_size": NUMBERS}, optional={"min_pattern_size": NUMBERS, "min_count": NUMBERS}
    ),
    "structured_outputs": st.fixed_dictionaries(
        {},
        optional={name: st.one_of(TEXTS, ANYTHING) for name in KINDS}
        | dict.fromkeys(("whitespace_pattern", "backend", "disable_fallback", "disable_any_whitespace"), ANYTHING),
    ),
}
LIKELY["guided_decoding"] = LIKELY["structured_outputs"]


@st.composite
def given_fields(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(SamplingParams.__struct_fields__), max_size=5, unique=True))
    return {name: draw(st.one_of(LIKELY.get(name, NUMBERS), ANYTHING)) for name in names}


def as_sent(value: Any) -> Any:
    """Tuples become lists when encoded, and NaN equals itself."""
    if isinstance(value, (list, tuple)):
        return [as_sent(one) for one in value]
    if isinstance(value, dict):
        return {key: as_sent(one) for key, one in value.items()}
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    if isinstance(value, msgspec.Struct):
        return {name: as_sent(one) for name, one in msgspec.structs.asdict(value).items()}
    return value


@settings(max_examples=examples(400))
@given(given_fields())
def test_what_is_accepted_survives_the_way(fields: dict[str, Any]) -> None:
    try:
        params = SamplingParams(**fields)
    except ValueError:
        return
    sent = EngineCoreRequest("a", 7, np.arange(3, dtype=np.int32), params, (2,), 1, 1.5)
    (got,) = Codec(ToEngine).decode(Codec().encode(AddRequests([sent]))).requests
    assert as_sent(got.params) == as_sent(params)


@settings(max_examples=examples(200))
@given(st.dictionaries(st.sampled_from(["start", "end", "open", "budget_end"]), ANYTHING))
def test_reasoning_that_is_accepted_survives_the_way(fields: dict[str, Any]) -> None:
    with contextlib.suppress(ValueError, TypeError):
        reasoning = ReasoningTokens(**fields)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(reasoning), type=ReasoningTokens) == reasoning
