"""Parsers of tool calls, one per format."""

from quire.entrypoints.parsers.tools.base import ToolParser
from quire.entrypoints.parsers.tools.registry import ToolParserManager, register_tool_parser

__all__ = ["ToolParser", "ToolParserManager", "register_tool_parser"]
