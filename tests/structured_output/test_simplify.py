"""Simpler schemas mean the same, and names have one spelling."""

import datetime
import json
import re

import jsonschema
import pytest

from quire.structured_output.bitmask import is_set
from quire.structured_output.schema.formats import PATTERNS
from quire.structured_output.schema.property_names import JsonPosition, PropertyNameMask
from quire.structured_output.schema.simplify import simplify
from quire.structured_output.vocabulary import Vocabulary
from tests.structured_output import suite
from tests.structured_output.cases import SCHEMAS, UNSUPPORTED

NARROWER = {"type": ["number", "boolean", "null"], "not": {"type": "integer"}}
CHANGED = [
    (
        {"unevaluatedProperties": False, "properties": {"a": {}}},
        {"properties": {"a": {}}, "additionalProperties": False},
    ),
    ({"type": "array", "unevaluatedItems": {"type": "null"}}, {"type": "array", "items": {"type": "null"}}),
    ({"then": {"const": 1}, "else": False, "minLength": 2.0}, {"minLength": 2}),
    ({"if": True, "then": {"const": 1}, "else": False}, {"allOf": [{"const": 1}]}),
    ({"contains": {}, "minContains": 2, "minItems": 3}, {"minItems": 3}),
    ({"uniqueItems": False}, {}),
    ({"uniqueItems": True, "maxItems": 1}, {"maxItems": 1}),
    ({"uniqueItems": True, "maxItems": 2}, {"uniqueItems": True, "maxItems": 2}),
    ({"not": {"type": ["object", "array", "string"]}}, {"type": ["number", "boolean", "null"]}),
    (NARROWER, {"type": ["boolean", "null"]}),
    ({"not": {}}, False),
    ({"properties": {"a": {"not": {}}}}, {"properties": {"a": False}}),
    ({"propertyNames": {"enum": ["a"]}}, {"properties": {"a": True}, "additionalProperties": False}),
    ({"enum": [{"not": {}}], "default": {"not": {}}}, {"enum": [{"not": {}}], "default": {"not": {}}}),
]


@pytest.mark.parametrize(("schema", "expected"), CHANGED)
def test_simplified_forms(schema: dict, expected: object) -> None:
    before = json.dumps(schema)
    assert simplify(schema) == expected
    assert json.dumps(schema) == before


def test_the_suite_agrees_with_simplified_schemas() -> None:
    changed = 0
    for group in suite.groups():
        small = simplify(group.schema)
        changed += small != group.schema
        if small == group.schema or "format" in group.file:
            continue
        # With integers other numbers go, and what is still unevaluated is refused by all.
        narrower = '"not"' in json.dumps(group.schema) or "unevaluated" in json.dumps(small)
        validator = jsonschema.Draft202012Validator(small)
        for instance, valid in group.tests:
            try:
                found = validator.is_valid(instance)
            except Exception as error:  # what it refers to was part of what is gone, or is elsewhere
                assert "Unresolvable" in repr(error), (group.name, error)
                break
            assert found == valid or (narrower and valid), (group.file, group.name, instance)
    assert changed > 80


def test_cases_that_change_stay_valid_schemas() -> None:
    for schema in (*SCHEMAS.values(), *UNSUPPORTED.values()):
        jsonschema.Draft202012Validator.check_schema(simplify(schema))


def test_dates_are_those_of_the_calendar() -> None:
    pattern = re.compile(PATTERNS["date"])
    for year in (*range(100), 400, 999, *range(1896, 2105), 9999):
        for month in range(14):
            for day in (0, 1, 28, 29, 30, 31, 32):
                text = f"{year:04d}-{month:02d}-{day:02d}"
                try:
                    datetime.date.fromisoformat(text)
                except ValueError:
                    assert not pattern.search(text), text
                else:
                    assert pattern.search(text), text


def test_positions_of_property_names() -> None:
    text = rb'{"a\"": ["x", {"b": "c"}, "d"], "e": 1}'
    names = "".join(chr(byte) if JsonPosition().after(text[:i]).in_name else "." for i, byte in enumerate(text))
    assert names.replace(".", "") == r'a\""b"e"'


def test_names_hold_no_escaped_letters(vocabulary: Vocabulary) -> None:
    spelling = PropertyNameMask(vocabulary)
    u, escape = (vocabulary.tokens.index(char) for char in (b"u", b"\\"))
    name, value = JsonPosition().after(b'{"'), JsonPosition().after(b'{"a":"')
    assert is_set(spelling.allowed(name), escape) and is_set(spelling.allowed(name), u)
    assert not is_set(spelling.allowed(name.after(b"\\")), u)
    assert is_set(spelling.allowed(name.after(rb"\\")), u)
    assert is_set(spelling.allowed(value.after(b"\\")), u)
