"""Schemas that a library would take too long for, or that are not schemas at all, are refused before it sees them."""

from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from quire.structured_output.backends.base import CompiledGrammar, GrammarError
from quire.structured_output.schema.metaschema import schema_fault, tag_fault
from quire.structured_output.schema.regexes import expanded_length
from quire.structured_output.schema.supported import schema_unsupported_by_xgrammar, unsupported_by_guidance
from tests.structured_output import suite
from tests.structured_output.cases import SCHEMAS, UNSUPPORTED

Compile = Callable[..., CompiledGrammar]


@pytest.mark.parametrize("multiple", [2**24, 2**31, 81_920_000, 0.16777216])
def test_multiples_that_compile_for_minutes_are_refused(compile: Compile, multiple: float) -> None:
    with pytest.raises(GrammarError, match="more than 10000 takes too long"):
        compile(json={"type": "number", "multipleOf": multiple}, backend="guidance")


@pytest.mark.parametrize("multiple", [4, 10_000, 10**6, 0.01, 0.0001])
def test_other_multiples_are_supported(multiple: float) -> None:
    assert unsupported_by_guidance({"type": "number", "multipleOf": multiple}) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": {}},
        {"type": "string", "format": ["date"]},
        {"type": "object", "properties": {"a": True}, "required": [[]]},
        {"type": "object", "properties": 5, "required": ["a"]},
    ],
)
def test_a_keyword_of_a_wrong_kind_is_a_reason_to_refuse(schema: dict[str, Any]) -> None:
    assert schema_unsupported_by_xgrammar(schema) is not None


def test_outlines_refuses_lengths_that_double_its_time_with_each_character(compile: Compile) -> None:
    with pytest.raises(GrammarError, match="more than 12 takes too long"):
        compile(json={"type": "array", "items": {"type": "string", "maxLength": 100_000}}, backend="outlines")


@pytest.mark.parametrize(
    ("regex", "length"),
    [
        ("abc", 3),
        ("a{3}b", 4),
        ("(ab){2,5}", 10),
        ("((a{0,10}){0,10}){0,10}", 1000),
        (r"[a-z\]{9}]{2}\{5}", 5),
        ("[]{5}]x{3,}", 4),
        ("(((a{2}", 2),
        ("a{0}*", 1),
    ],
)
def test_repeats_count_with_their_maximum(regex: str, length: int) -> None:
    assert expanded_length(regex) == length


@pytest.mark.parametrize("backend", ["outlines", "lm-format-enforcer"])
def test_nested_repeats_are_refused_by_backends_that_create_all_states(compile: Compile, backend: str) -> None:
    with pytest.raises(GrammarError, match="repeats that expand it to more than"):
        compile(regex="((a{0,10000}){0,1000}){0,1000}", backend=backend)


def test_an_invalid_enum(compile: Compile) -> None:
    with pytest.raises(GrammarError):
        compile(json={"enum": 5}, backend="outlines")


INVALID: list[dict[str, Any]] = [
    {"type": "object", "contains": 1},
    {"type": "string", "minItems": -1},
    {"type": "string", "maxLength": 1.5},
    {"type": "integer", "minLength": True},
    {"type": "string", "multipleOf": 0},
    {"type": "string", "required": "a"},
    {"type": "string", "required": [1]},
    {"type": "string", "uniqueItems": 1},
    {"type": "string", "properties": {"a": 5}},
    {"type": "string", "anyOf": []},
    {"type": "object", "properties": {"a": {"type": "text"}}},
    {"type": ["string", "text"]},
    {"type": "string", "enum": "a"},
    {"type": "string", "pattern": 5},
    {"type": "string", "dependentRequired": {"a": "b"}},
    {"type": "null", "not": None},
    {"type": "null", "minimum": "1"},
    {"type": "null", "prefixItems": [True, 7]},
    {"type": "null", "items": 7},
    {"type": "null", "$defs": {"unused": {"then": []}}},
]


@pytest.mark.parametrize("schema", INVALID, ids=str)
def test_invalid_keywords_are_refused_even_without_effect(schema: dict[str, Any]) -> None:
    fault = schema_fault(schema)
    assert fault is not None and "it must be" in fault
    with pytest.raises(jsonschema.SchemaError) as refused:
        jsonschema.Draft202012Validator.check_schema(schema)
    # Both name the keyword whose value is wrong, or the place in it.
    assert fault.split()[0] in {str(step) for step in refused.value.absolute_path}


def test_a_request_learns_which_keyword_is_wrong(compile: Compile) -> None:
    with pytest.raises(GrammarError, match="not valid JSON Schema: contains is 1; it must be a schema"):
        compile(json={"type": "object", "contains": 1})
    tag = {
        "type": "structural_tag",
        "format": {"type": "json_schema", "json_schema": {"type": "null", "minItems": "1"}},
    }
    with pytest.raises(GrammarError, match="minItems is '1'; it must be a whole number"):
        compile(structural_tag=tag)
    assert tag_fault({"type": "structural_tag", "format": {"type": "json_schema", "json_schema": True}}) is None


def test_every_schema_of_the_suite_and_of_older_drafts_passes() -> None:
    for group in suite.groups():
        assert schema_fault(group.schema) is None, group.name
    for schema in (*SCHEMAS.values(), *UNSUPPORTED.values()):
        assert schema_fault(schema) is None, schema
    older = {"items": [{"type": "null"}], "minimum": 0, "exclusiveMinimum": True, "title": None, "x-own": {"type": 5}}
    assert schema_fault(older) is None
