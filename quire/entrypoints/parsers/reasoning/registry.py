"""Reasoning formats by name, or by import path for custom ones."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from quire.entrypoints.parsers.base import TextParser
from quire.entrypoints.parsers.reasoning.formats import FORMATS, NOT_YET, OTHER_FORMATS

F = TypeVar("F")


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


_registered: dict[str, ReasoningFormat] = {}


def register_reasoning_parser(name: str) -> Callable[[F], F]:
    """For plugins (--reasoning-parser-plugin): a decorator of a class whose instances are formats, or a function to
    call with a format. The name of a built-in format overrides it."""

    def register(given: F) -> F:
        made = given() if isinstance(given, type) else given
        _registered[name] = _checked(made, f"the reasoning parser {name}")
        return given

    return register


class ReasoningParserManager:
    """vLLM's way to write a registration: @ReasoningParserManager.register_module("name")."""

    @staticmethod
    def register_module(name: str | Sequence[str], force: bool = True) -> Callable[[F], F]:
        def register(given: F) -> F:
            for one in [name] if isinstance(name, str) else name:
                if not force and one in known_formats():
                    raise ValueError(f"the reasoning parser {one} is registered already")
                register_reasoning_parser(one)(given)
            return given

        return register


def known_formats() -> list[str]:
    return sorted({*FORMATS, *OTHER_FORMATS, *_registered})


def reasoning_format(name: str) -> ReasoningFormat:
    built_in: dict[str, ReasoningFormat] = {**FORMATS, **OTHER_FORMATS, **_registered}
    if name in built_in:
        return built_in[name]
    if name in NOT_YET:
        raise ValueError(f"--reasoning-parser {name} is not available yet: response templates of tokenizers")
    module, colon, attribute = name.partition(":")
    if not colon:
        known = ", ".join(known_formats())
        raise ValueError(
            f"--reasoning-parser {name} is not known; use one of {known}, none, or your own as module:name"
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--reasoning-parser {name} cannot be imported: {error}") from error
    return _checked(found, f"--reasoning-parser {name}")


def _checked(found: Any, what: str) -> ReasoningFormat:
    if not isinstance(found, ReasoningFormat):
        needed = "start, end, end_markers, markers, is_open() and parser()"
        raise ValueError(f"{what} is not a reasoning format; it needs {needed}, as a TagFormat has")
    return found
