"""Separates a model's reasoning from the content of its response."""

from quire.entrypoints.parsers.reasoning.formats import FORMATS
from quire.entrypoints.parsers.reasoning.registry import ReasoningFormat, reasoning_format
from quire.entrypoints.parsers.reasoning.tags import TagFormat, TagParser

__all__ = ["FORMATS", "ReasoningFormat", "TagFormat", "TagParser", "reasoning_format"]
