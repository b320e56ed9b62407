"""Tools for models whose chat template does not know them: described in the system message, as JSON."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import meta

from quire.tokenizer.chat_template import parse_template

INSTRUCTION = """\
You can call these functions, each described by the JSON schema of its parameters:
{tools}

If a function is needed to answer, reply with nothing but a JSON list of the calls:
[{{"name": "<function>", "parameters": {{"<parameter>": <value>}}}}]
You will then get the results. If no function is needed, answer in plain text."""


@lru_cache(maxsize=64)
def takes_tools(template: str) -> bool:
    try:
        return "tools" in meta.find_undeclared_variables(parse_template(template))
    except ValueError:  # rendering will say why
        return False


@lru_cache(maxsize=64)
def takes_system(template: str) -> bool:
    return "system" in template and "System role not supported" not in template


def mentions_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> bool:
    return bool(tools) or any(message.get("tool_calls") or message.get("role") == "tool" for message in messages)


def describe_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, template: str
) -> list[dict[str, Any]]:
    """The conversation as plain text: calls and results of earlier turns too."""
    described = _without_calls(messages)
    if not tools:
        return described
    functions = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    text = INSTRUCTION.format(tools=functions)
    if described and described[0].get("role") in ("system", "developer"):
        text = _joined(described.pop(0).get("content"), text)
    if takes_system(template):
        return [{"role": "system", "content": text}, *described]
    if described and described[0].get("role") == "user":
        text = _joined(text, described.pop(0).get("content"))
    return [{"role": "user", "content": text}, *described]


def _without_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    plain: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    results: list[str] = []  # of the calls since the last message; some templates want roles to alternate

    def add_results() -> None:
        if results:
            plain.append({"role": "user", "content": "\n\n".join(results)})
            results.clear()

    for given in messages:
        message = dict(given)
        if isinstance(message.get("tool_calls"), list):
            written = [_call(call, names) for call in message.pop("tool_calls")]
            calls = json.dumps(written, ensure_ascii=False) if written else None
            message["content"] = _joined(message.get("content"), calls)
        if message.get("role") != "tool":
            add_results()
            plain.append(message)
            continue
        id = message.get("tool_call_id")
        name = (names.get(id) if isinstance(id, str) else None) or message.get("name") or "the call"
        results.append(f"Result of {name}:\n{_text(message.get('content'))}")
    add_results()
    return plain


def _call(call: Any, names: dict[str, str]) -> dict[str, Any]:
    """A call of the history in the form that the instruction asks for."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError("tool_calls of a message must be objects with id, type and function: {name, arguments}")
    if isinstance(call.get("id"), str):
        names[call["id"]] = function["name"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # what is not JSON stays a text
            arguments = json.loads(arguments or "{}")
    return {"name": function["name"], "parameters": arguments}


def _joined(*contents: Any) -> str:
    return "\n\n".join(text for content in contents if (text := _text(content)))


def _text(content: Any) -> str:
    """A content, a text or a list of parts, as text."""
    if isinstance(content, list):
        parts = (part.get("text") if isinstance(part, Mapping) else part for part in content)
        return "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""
