"""Separates a model's reasoning from the content of its response."""

from quire.entrypoints.parsers.reasoning.formats import FORMATS
from quire.entrypoints.parsers.reasoning.registry import (
    ReasoningFormat,
    ReasoningParserManager,
    reasoning_format,
    register_reasoning_parser,
)
from quire.entrypoints.parsers.reasoning.tags import TagFormat, TagParser

__all__ = [
    "FORMATS",
    "ReasoningFormat",
    "ReasoningParserManager",
    "TagFormat",
    "TagParser",
    "reasoning_format",
    "register_reasoning_parser",
]
