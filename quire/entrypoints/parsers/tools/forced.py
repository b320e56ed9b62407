"""Parsers of calls that a grammar has forced: see `ToolUse.schema`."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.entrypoints.parsers.tools.json_calls import JsonCallParser
from quire.entrypoints.parsers.tools.reader import Reading


class RequiredParser(JsonCallParser):
    """[{"name": "f", "parameters": {...}}, ...]"""

    def steps(self) -> Reading[None]:
        yield from self.reader.space(self.content)
        yield from self.attempt(self.call_list())


class NamedParser(JsonCallParser):
    """The arguments of the function that tool_choice names."""

    def __init__(self, name: str, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self.name = name

    def steps(self) -> Reading[None]:
        yield from self.reader.space(self.content)
        yield from self.attempt(self.call_arguments(self.name))
