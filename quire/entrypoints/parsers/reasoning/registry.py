"""Reasoning formats by name, or by import path where they are somebody's own."""

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
        """What ends the reasoning; forced when a thinking budget is used up."""
        ...

    @property
    def end_markers(self) -> Sequence[str]:
        """All texts with which reasoning is over."""
        ...

    @property
    def markers(self) -> Sequence[str]:
        """Texts that the parser has to see even where the tokenizer calls them special tokens."""
        ...

    def is_open(self, prompt: str, goes_on: bool = False) -> bool | None:
        """Whether an answer to this prompt begins inside the reasoning, after it, or decides that itself (None)."""
        ...

    def parser(self, open: bool | None) -> TextParser:
        """A new parser for one answer."""
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
        raise ValueError(f"--reasoning-parser {name} is no reasoning format; it needs {needed}, as a TagFormat has")
    return found
