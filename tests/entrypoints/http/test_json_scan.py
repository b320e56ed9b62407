"""Counting the values of a JSON text without decoding it."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.entrypoints.http import json_scan
from quire.entrypoints.http.json_scan import JsonCounts, count_json
from tests.properties import examples

ALL = JsonCounts(1 << 60, 1 << 60, 1 << 60)
TEXTS = st.text(st.sampled_from('\\",[]{}:é a'), max_size=12)
VALUES = st.recursive(
    st.one_of(st.none(), st.integers(), TEXTS),
    lambda inner: st.one_of(st.lists(inner, min_size=1), st.dictionaries(TEXTS, inner, min_size=1)),
    max_leaves=30,
)


def counted(value: Any) -> tuple[int, int]:
    inner = [counted(part) for part in (value.values() if isinstance(value, dict) else value)] if _holds(value) else []
    return 1 + sum(values for values, _ in inner), _holds(value) + sum(containers for _, containers in inner)


def _holds(value: Any) -> bool:
    return isinstance(value, (dict, list))


@pytest.mark.parametrize("size", [1, 2, 7, 1 << 20])
@settings(max_examples=examples(75))
@given(body=st.dictionaries(TEXTS, VALUES, min_size=1))
def test_counts_are_exact(size: int, body: dict[str, Any]) -> None:
    before, json_scan.SLICE = json_scan.SLICE, size
    try:
        found = count_json(json.dumps(body, ensure_ascii=False).encode(), ALL)
    finally:
        json_scan.SLICE = before
    values, containers = counted(body)
    assert found == JsonCounts(values, containers, len(body))


@given(st.binary())
def test_any_bytes_are_counted(text: bytes) -> None:
    count_json(text, ALL)


def test_a_million_is_not_counted_to_its_end() -> None:
    text = b'{"a":[' + b"{}," * (1 << 20)
    assert count_json(text, JsonCounts(100, 100, 100)).containers < 1 << 19
