"""Tool calls: what a request offers, and how each family of models writes a call."""

from quire.entrypoints.openai.tools.base import ToolParser
from quire.entrypoints.openai.tools.registry import register_tool_parser

__all__ = ["ToolParser", "register_tool_parser"]
