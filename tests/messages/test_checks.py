"""Oversized values are refused by their count, before anything is copied."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire.config.shown import SHOWN_KEYS, oversize_reason, shown
from quire.messages.checks import MAX_PLAIN_VALUES, check_plain
from quire.messages.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from quire.messages.structured import MAX_CHOICES, MAX_TEXT, StructuredOutputsParams, as_structured


class Reading:
    """Counts the elements read, and fails beyond `most`."""

    def __init__(self, size: int, most: int = 0) -> None:
        self.size = size
        self.most = most

    def read(self, values: Iterator[Any]) -> Iterator[Any]:
        for place, value in enumerate(values):
            assert place < self.most, f"more than {self.most} entries were read"
            yield value


class HugeDict(dict[str, int]):
    """`size` keys, of which only the first `most` may be read."""

    def __init__(self, size: int, most: int = 0) -> None:
        super().__init__(a=1)
        self.reading = Reading(size, most)

    def __len__(self) -> int:
        return self.reading.size

    def __iter__(self) -> Iterator[str]:
        return self.reading.read(f"key {i}" for i in range(len(self)))

    def keys(self) -> Any:
        return iter(self)

    values = items = keys


class HugeList(list[Any]):
    def __init__(self, size: int, most: int = 0) -> None:
        super().__init__([0])
        self.reading = Reading(size, most)

    def __len__(self) -> int:
        return self.reading.size

    def __iter__(self) -> Iterator[Any]:
        return self.reading.read(iter(range(len(self))))


@pytest.mark.parametrize(
    "refused",
    [
        lambda: check_plain("extra_args", HugeDict(MAX_PLAIN_VALUES)),
        lambda: check_plain("extra_args", {"a": [HugeList(MAX_PLAIN_VALUES + 1)]}),
        lambda: SamplingParams(extra_args=HugeDict(MAX_PLAIN_VALUES)),
        lambda: SamplingParams(logit_bias=HugeDict(MAX_LOGIT_BIAS + 1)),  # type: ignore[arg-type]
        lambda: SamplingParams(stop=HugeList(MAX_STOP_STRINGS + 1)),
        lambda: SamplingParams(stop_token_ids=HugeList(MAX_STOP_TOKEN_IDS + 1)),
        lambda: SamplingParams(bad_words=HugeList(MAX_BAD_WORDS + 1)),
        lambda: SamplingParams(allowed_token_ids=HugeList(MAX_ALLOWED_TOKEN_IDS + 1)),
        lambda: SamplingParams(repetition_detection=HugeDict(4)),  # type: ignore[arg-type]
        lambda: StructuredOutputsParams(choice=HugeList(MAX_CHOICES + 1)),
        lambda: StructuredOutputsParams(json=HugeDict(MAX_TEXT)),
        lambda: StructuredOutputsParams(json={"enum": HugeList(MAX_TEXT)}),
        lambda: StructuredOutputsParams(structural_tag={"format": [HugeList(MAX_TEXT)]}),
    ],
)
def test_counts_come_first(refused: Callable[[], None]) -> None:
    with pytest.raises(ValueError, match=r"at most|more than"):
        refused()


def test_an_iterator_is_read_no_further_than_allowed() -> None:
    endless = Reading(0, most=MAX_STOP_TOKEN_IDS + 1).read(iter(range(10**9)))
    with pytest.raises(ValueError, match=r"^stop_token_ids has 257 entries; at most 256"):
        SamplingParams(stop_token_ids=endless)  # type: ignore[arg-type]


def test_a_few_of_many_unknown_keys_are_named() -> None:
    with pytest.raises(ValueError, match=r"unknown keys \['key 0', .*'key 7'\] and more; allowed: json, ") as error:
        as_structured(HugeDict(500_000, most=SHOWN_KEYS + 1))
    assert len(str(error.value)) < 1000
    with pytest.raises(ValueError, match=r"unknown keys \['a', 'b'\]; allowed: "):
        as_structured({"b": 1, "a": 2, "regex": "x"})


def test_large_values_are_not_printed_in_errors() -> None:
    assert shown([HugeList(10**6)]) == "a list of 1 entries"
    assert shown({"a": {"b": HugeDict(10**6)}}) == "a dict of 1 entries"
    assert shown([[1, 2], {"a": "b"}]) == "[[1, 2], {'a': 'b'}]"


def test_no_json_that_fits_is_refused_by_its_count() -> None:
    fits: list[Any] = [[1] * 49, ["ab"] * 19, {"a" * 8: "b" * 80}, [[], [], []]]
    assert [oversize_reason(value, 100, 2) for value in fits] == [None] * 4
    assert oversize_reason([1] * 51, 100, 2) == "has at least 102 bytes; at most 100 are allowed"
    assert oversize_reason({"a" * 101: 1}, 100, 2) == "has at least 103 bytes; at most 100 are allowed"
    assert oversize_reason([[[[]]]], 100, 2) == "is nested more than 2 levels deep"
