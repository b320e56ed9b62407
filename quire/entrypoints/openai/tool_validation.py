"""Validation of a request's tools and tool_choice."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.config.shown import oversize_reason, shown
from quire.entrypoints.http.errors import ApiError, bad_request

MAX_SCHEMA_BYTES = 256 * 1024  # of one function, and of the schema compiled into a grammar
MAX_TOOLS_BYTES = 1024 * 1024  # of all tools
MAX_DEPTH = 64
MAX_DESCRIPTION = 64 * 1024
NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
CHOICES = ("none", "auto", "required")


def check_tools(tools: Sequence[Any], most: int) -> None:
    if len(tools) > most:
        raise bad_request(f"tools has {len(tools)} entries; at most {most} are allowed (--max-tools)", "tools")
    names: set[str] = set()
    size = 0
    for place, tool in enumerate(tools):
        where = f"tools[{place}]"
        if tool.get("type", "function") != "function":
            raise _wrong(f"{where}.type is {shown(tool['type'])}; only function is supported")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise _wrong(f"{where}.function must be an object with name and parameters")
        name = function.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise _wrong(f"{where}.function.name must be 1 to 128 letters, digits, underscores, dots or dashes")
        if name in names:
            raise _wrong(f"{where}.function.name is {name!r}, already the name of an earlier tool; names must differ")
        names.add(name)
        size += _check_function(function, f"{where}.function")
    if size > MAX_TOOLS_BYTES:
        raise _wrong(f"tools has {size} bytes; at most {MAX_TOOLS_BYTES} are allowed")


def _check_function(function: Mapping[str, Any], where: str) -> int:
    """Its size in bytes."""
    description, parameters = function.get("description"), function.get("parameters")
    if description is not None and (not isinstance(description, str) or len(description) > MAX_DESCRIPTION):
        raise _wrong(f"{where}.description must be a text of at most {MAX_DESCRIPTION} characters")
    if function.get("strict") not in (None, True, False):
        raise _wrong(f"{where}.strict must be true or false")
    if parameters is not None:
        if not isinstance(parameters, Mapping):
            raise _wrong(f"{where}.parameters must be a JSON schema, an object")
        if parameters.get("type", "object") != "object":
            raise _wrong(f"{where}.parameters must be the schema of an object: type is {shown(parameters['type'])}")
        if not isinstance(parameters.get("properties", {}), Mapping):
            raise _wrong(f"{where}.parameters.properties must be an object")
    if reason := oversize_reason(function, MAX_SCHEMA_BYTES, MAX_DEPTH):
        raise _wrong(f"{where} {reason}")
    size = len(json.dumps(function))
    if size > MAX_SCHEMA_BYTES:
        raise _wrong(f"{where} has {size} bytes; at most {MAX_SCHEMA_BYTES} are allowed")
    return size


def named_function(choice: Any) -> str | None:
    """The function named by tool_choice, or None."""
    if choice is None or choice in CHOICES:
        return None
    if isinstance(choice, Mapping) and choice.get("type", "function") == "function":
        function = choice.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            return str(function["name"])
    allowed = 'none, auto, required or {"type": "function", "function": {"name": ...}}'
    raise bad_request(f"tool_choice must be {allowed}", "tool_choice")


def _wrong(message: str) -> ApiError:
    return bad_request(message, "tools")
