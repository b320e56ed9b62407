"""Runs a parser on a text, whole or in pieces."""

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from quire.entrypoints.parsers.base import ParsedDelta, TextParser
from quire.entrypoints.parsers.tools.registry import tool_parser

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "where": {"type": "object"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "tags": {"type": ["array", "null"]},
    },
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
    {"type": "function", "function": {"name": "math.add", "parameters": {"type": "object", "properties": {}}}},
]


@dataclass
class Result:
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # name, arguments
    ids: list[str] = field(default_factory=list)

    @property
    def parsed(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def parse(parser: TextParser, pieces: Iterable[str]) -> Result:
    result = Result()

    def add(delta: ParsedDelta) -> None:
        result.content += delta.content
        result.reasoning += delta.reasoning
        for call in delta.tool_calls:
            if call.name is not None:
                assert call.id and call.arguments == "" and call.index == len(result.calls)
                result.calls.append((call.name, ""))
                result.ids.append(call.id)
            else:
                assert call.id is None and call.arguments and call.index == len(result.calls) - 1
                name, arguments = result.calls[call.index]
                result.calls[call.index] = (name, arguments + call.arguments)

    for piece in pieces:
        add(parser.feed(piece))
    add(parser.finish())
    return result


def whole(name: str, text: str, tools: list[dict[str, Any]] = TOOLS) -> Result:
    return parse(tool_parser(name)(tools), [text])


def cuts(text: str, seed: int = 0) -> Iterator[list[str]]:
    """Every cut in two, all characters alone, and random pieces."""
    for place in range(len(text) + 1):
        yield [text[:place], text[place:]]
    yield list(text)
    draw = random.Random(seed)
    for _ in range(8):
        places = sorted(draw.randrange(len(text) + 1) for _ in range(draw.randrange(2, 12)))
        yield [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def same_in_pieces(name: str, text: str, tools: list[dict[str, Any]] = TOOLS) -> Result:
    expected = whole(name, text, tools)
    for pieces in cuts(text):
        found = parse(tool_parser(name)(tools), pieces)
        assert (found.content, found.reasoning, found.calls) == (expected.content, expected.reasoning, expected.calls)
    return expected
