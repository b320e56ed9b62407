"""Reasoning formats by name, or by import path for custom ones."""

import importlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from quire.entrypoints.parsers.base import TextParser
from quire.entrypoints.parsers.reasoning.formats import FORMATS


@runtime_checkable
class ReasoningFormat(Protocol):
    """What `--reasoning-parser module:name` must name; a TagFormat is one."""

    @property
    def start(self) -> str: ...

    @property
    def end(self) -> str:
        """The end tag; forced when the thinking budget is exhausted."""
        ...

    @property
    def end_markers(self) -> Sequence[str]:
        """All texts that end the reasoning."""
        ...

    @property
    def markers(self) -> Sequence[str]:
        """Texts that must not be skipped as special tokens."""
        ...

    def is_open(self, prompt: str, continues: bool = False) -> bool | None:
        """Whether a response to this prompt starts inside the reasoning (True), after it (False), or either (None)."""
        ...

    def parser(self, open: bool | None) -> TextParser:
        """A new parser for one response."""
        ...


def reasoning_format(name: str) -> ReasoningFormat:
    if name in FORMATS:
        return FORMATS[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        known = ", ".join(sorted(FORMATS))
        raise ValueError(f"--reasoning-parser {name} is not known; use one of {known}, or your own as module:name")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--reasoning-parser {name} cannot be imported: {error}") from error
    if not isinstance(found, ReasoningFormat):
        needed = "start, end, end_markers, markers, is_open() and parser()"
        raise ValueError(f"--reasoning-parser {name} is not a reasoning format; it needs {needed}, as a TagFormat has")
    return found
