"""Random arguments, written in each format, come back exactly, whole and in pieces, for a bounded amount of work."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.entrypoints.parsers.tools.forced import NamedParser, RequiredParser
from quire.entrypoints.parsers.tools.reader import Reader
from quire.entrypoints.parsers.tools.registry import BUILT_IN, tool_parser
from tests.entrypoints.tools.parsed import TOOLS, Result, parse
from tests.entrypoints.tools.rendered import KINDS, UNQUOTED, WRITERS, Call, as_json, listed
from tests.properties import examples

NAMES = ["get_weather", "now", "math.add"]
PLAIN_KEYS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
HARD_TEXTS = st.sampled_from(
    [
        *[
            "",
            '"',
            "\\",
            "\n",
            "\\n",
            "\\u00e9",
            "é",
            "東京 🌧",
            "'",
            " x ",
            "null",
            "3",
            "\x85\u2028\x00",
            "]",
            "})",
            "; {",
        ],
        *["<tool_call>", "</tool_call>", '{"name": "now"}', "```", "[TOOL_CALLS]", "<|call|>", "<｜tool▁call▁end｜>"],
    ]
)
TEXTS = HARD_TEXTS | st.text(st.characters(codec="utf-8"), max_size=12)
NUMBERS = st.integers(-(10**25), 10**25) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    TEXTS | NUMBERS | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


# How text is written before a call, where every message has a header.
HEADED = {
    "openai": "<|channel|>commentary<|message|>{}<|end|><|start|>assistant",
    "muse_glimmer": " to=user<|message|>{}<|eom|><|start|>assistant",
}


def calls_of(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Call]]:
    arguments = st.dictionaries(PLAIN_KEYS, values, max_size=4)
    return st.lists(st.tuples(st.sampled_from(NAMES), arguments), min_size=1, max_size=3)


def tools_for(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Functions with schemas that match the arguments. A second call of a function that does not match is dropped."""
    schemas: dict[str, Any] = {}
    for name, arguments in calls:
        types = {key: {"type": KINDS[type(value)]} for key, value in arguments.items()}
        schemas[name] = {"type": "object", "properties": types}
    return [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in schemas.items()]


def in_pieces(make: Callable[[], Any], text: str, cuts: Sequence[int]) -> Result:
    """The result, which must be equal for all ways of splitting the text."""
    whole = parse(make(), [text])
    places = sorted(cut % (len(text) + 1) for cut in cuts)
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    for found in (parse(make(), list(text)), parse(make(), pieces)):
        assert (found.content, found.reasoning, found.calls) == (whole.content, whole.reasoning, whole.calls)
    return whole


def test_every_parser_is_here() -> None:
    parsers = {BUILT_IN[name]: name for name in BUILT_IN}
    assert {BUILT_IN[name] for name in WRITERS} == set(parsers)


@pytest.mark.parametrize(("format", "way"), [(name, i) for name in WRITERS for i in range(len(WRITERS[name]))])
@settings(max_examples=examples(40))
@given(data=st.data())
def test_arguments_come_back(format: str, way: int, data: st.DataObject) -> None:
    closing = UNQUOTED.get(format)
    values = VALUES if format != "minimax_m3" else TEXTS | NUMBERS | st.booleans() | st.none()
    values = values if closing is None else values.filter(lambda value: closing not in str(value))
    calls = data.draw(calls_of(values))
    if closing is not None:
        calls = list({name: (name, arguments) for name, arguments in calls}.values())
    before = "" if format in ("pythonic", "granite") else data.draw(st.sampled_from(["", "Well: ", "Zürich\n\n"]))
    if format in HEADED and before:
        text = HEADED[format].format(before) + WRITERS[format][way](calls)
    else:
        text = before + WRITERS[format][way](calls)
    tools = tools_for(calls) if closing is not None else TOOLS
    result = in_pieces(lambda: tool_parser(format)(tools), text, data.draw(st.lists(st.integers(0, 10**6), max_size=8)))
    assert result.parsed == calls
    assert result.content == before.rstrip()


@settings(max_examples=examples(40))
@given(calls=calls_of(VALUES), cuts=st.lists(st.integers(0, 10**6), max_size=8))
def test_forced_calls_come_back(calls: list[Call], cuts: list[int]) -> None:
    assert in_pieces(lambda: RequiredParser(TOOLS), listed(calls, "parameters"), cuts).parsed == calls
    name, arguments = calls[0]
    assert in_pieces(lambda: NamedParser(name, TOOLS), as_json(arguments), cuts).parsed == calls[:1]


@settings(max_examples=examples(150))
@given(data=st.data())
def test_broken_texts_are_read_alike(data: st.DataObject) -> None:
    """Markers, halves of markers and calls in any order: nothing is lost but layout, whatever the cuts."""
    format = data.draw(st.sampled_from(sorted(WRITERS)))
    markers = [*getattr(tool_parser(format), "markers", ())]
    call = WRITERS[format][0]([("get_weather", {"city": "Oslo"}), ("now", {})])
    parts = [*markers, *(m[: len(m) // 2] for m in markers), call, call[:-3], call[: len(call) // 2], *'{}[](),"\n :']
    text = "".join(data.draw(st.lists(st.sampled_from([*parts, '{"name": "now"', "now", "é"]), max_size=8)))
    in_pieces(lambda: tool_parser(format)(TOOLS), text, data.draw(st.lists(st.integers(0, 10**6), max_size=6)))


class Counted(str):
    """A string that counts the characters searched or copied."""

    work = 0

    def find(self, *args: Any) -> int:
        place, start = super().find(*args), args[1] if len(args) > 1 else 0
        Counted.work += (place if place >= 0 else len(self)) - start
        return place

    def __getitem__(self, key: Any) -> str:
        part = super().__getitem__(key)
        Counted.work += len(part)
        return part


UNITS = ["{", "[", "x ", '{"name": ', "<tool_call>", '"', "\\", '<tool_call>{"name": "f", "arguments": {"a": "b"}}']


@pytest.mark.parametrize("format", WRITERS)
def test_work_is_in_proportion_to_the_text(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and character by character; and a call's arguments are not copied again for each piece."""
    add = Reader.add

    def counted(self: Reader, text: str) -> None:
        add(self, text)
        self.text = Counted(self.text)

    monkeypatch.setattr(Reader, "add", counted)

    def work(text: str, one_by_one: bool) -> int:
        Counted.work = 0
        parse(tool_parser(format)(TOOLS), list(text) if one_by_one else [text])
        return Counted.work

    markers = getattr(tool_parser(format), "markers", ())
    long = WRITERS[format][0]([("now", {"a": [1, "b"] * 8})])
    for unit in [*UNITS, *markers, long]:
        for one_by_one in (False, True):
            single, double = (work(unit * (size // len(unit) + 1), one_by_one) for size in (1000, 2000))
            assert double <= 2.3 * single + 1000, unit


def test_complete_arguments_are_valid_json() -> None:
    """The joined arguments of a stream are always a prefix of the whole response's."""
    calls: list[Call] = [("get_weather", {"city": 'Zürich "x"', "where": {"a": [1.5, None, True]}, "days": 3})]
    for format, writers in WRITERS.items():
        tools = tools_for(calls)
        for write in writers:
            text = write(calls)
            ((_, expected),) = parse(tool_parser(format)(tools), [text]).calls
            parser = tool_parser(format)(tools)
            told = ""
            for char in text:
                told += "".join(call.arguments for call in parser.feed(char).tool_calls)
                assert expected.startswith(told)
            told += "".join(call.arguments for call in parser.finish().tool_calls)
            assert told == expected and json.loads(told) == calls[0][1]
