"""Tool calls: what a request offers, and how each family of models writes a call."""

from quire.entrypoints.parsers.tools.base import ToolParser
from quire.entrypoints.parsers.tools.registry import register_tool_parser

__all__ = ["ToolParser", "register_tool_parser"]
