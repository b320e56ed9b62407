"""Tool parsers by name, or by import path for custom ones."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from quire.entrypoints.parsers.base import TextParser

# Creates a parser for one response from the request's tools. Its attribute `markers`, if any, lists special tokens that
# must not be skipped in the text.
ParserFactory = Callable[[Sequence[Mapping[str, Any]]], TextParser]
F = TypeVar("F", bound=ParserFactory)

PACKAGE = "quire.entrypoints.parsers.tools"
BUILT_IN = {
    "deepseek_v3": "sections:DeepSeekParser",
    "deepseek_v31": "sections:DeepSeekParser",
    "glm45": "xml:Glm45Parser",
    "glm47": "xml:Glm45Parser",
    "granite": "json_calls:GraniteParser",
    "granite-20b-fc": "json_calls:Granite20bParser",
    "granite4": "json_calls:HermesParser",
    "hermes": "json_calls:HermesParser",
    "jamba": "json_calls:JambaParser",
    "kimi_k2": "sections:KimiParser",
    "llama3_json": "json_calls:Llama3JsonParser",
    "llama4_json": "json_calls:Llama3JsonParser",
    "llama4_pythonic": "pythonic:PythonicParser",
    "mistral": "mistral:MistralParser",
    "openai": "harmony:HarmonyParser",
    "phi4_mini_json": "json_calls:Phi4MiniParser",
    "pythonic": "pythonic:PythonicParser",
    "qwen": "json_calls:HermesParser",
    "qwen3_coder": "xml:Qwen3CoderParser",
    "qwen3_xml": "xml:Qwen3CoderParser",
}
_registered: dict[str, ParserFactory] = {}


def register_tool_parser(name: str) -> Callable[[F], F]:
    """A decorator for plugins' parsers (--tool-parser-plugin); the name of a built-in parser overrides it."""

    def register(factory: F) -> F:
        _registered[name] = factory
        return factory

    return register


def known_parsers() -> list[str]:
    return sorted({*BUILT_IN, *_registered})


def tool_parser(name: str) -> ParserFactory:
    if name in _registered:
        return _registered[name]
    if name in BUILT_IN:
        module, _, attribute = f"{PACKAGE}.{BUILT_IN[name]}".partition(":")
    else:
        module, colon, attribute = name.partition(":")
        if not colon:
            known = ", ".join(known_parsers())
            raise ValueError(f"--tool-call-parser {name} is not known; use one of {known}, or your own as module:name")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--tool-call-parser {name} cannot be imported: {error}") from error
    return check_factory(found, f"--tool-call-parser {name}")


def check_factory(factory: Any, what: str) -> ParserFactory:
    try:
        parser = factory([])
    except TypeError as error:
        raise ValueError(f"{what} must be callable with the list of tools: {error}") from error
    if not all(callable(getattr(parser, method, None)) for method in ("feed", "finish")):
        raise ValueError(f"{what} does not create a text parser; it needs feed() and finish(), as a ToolParser has")
    made: ParserFactory = factory
    return made


def load_plugin(path: str) -> None:
    """A file or a module that calls `register_tool_parser`."""
    try:
        if not path.endswith(".py"):
            importlib.import_module(path)
            return
        spec = importlib.util.spec_from_file_location(f"quire_tool_parser_{Path(path).stem}", path)
        assert spec is not None and spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(f"--tool-parser-plugin {path} cannot be imported: {error}") from error
