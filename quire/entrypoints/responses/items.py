"""Input items of a response, as chat messages."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.config.shown import shown
from quire.entrypoints.http.errors import bad_request
from quire.entrypoints.openai.translated import kind_of, string

ITEMS = "message, reasoning, function_call, function_call_output"
ROLES = ("user", "assistant", "system", "developer")
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}  # part -> its field
UNFINISHED = ("in_progress", "incomplete")


def as_items(given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A request's input as items."""
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else [*map(dict, given)]


def messages(items: Sequence[Mapping[str, Any]], where: str = "input") -> list[dict[str, Any]]:
    """Reasoning and calls join the message of the assistant that they belong to."""
    found: list[dict[str, Any]] = []
    reasoning: list[str] = []  # of the assistant's next message

    def of_assistant() -> dict[str, Any]:
        if reasoning or not found or found[-1]["role"] != "assistant":
            found.append({"role": "assistant", "content": None})
            if reasoning:
                found[-1]["reasoning_content"] = "".join(reasoning)
                reasoning.clear()
        return found[-1]

    for index, given in enumerate(items):
        at = f"{where}[{index}]"
        item, kind = kind_of(given, at, ITEMS, default="message")
        match kind:
            case "message":
                role, content = _role(item, at), _text(item.get("content"), f"{at}.content")
                if role == "assistant" and reasoning:
                    of_assistant()["content"] = content
                else:
                    found.append({"role": role, "content": content})
            case "reasoning":
                reasoning.append(_reasoning(item, at))
            case "function_call":
                message = of_assistant()
                function = {"name": string(item, "name", at), "arguments": string(item, "arguments", at)}
                call = {"id": string(item, "call_id", at), "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
            case "function_call_output":
                content = _text(item.get("output"), f"{at}.output")
                found.append({"role": "tool", "tool_call_id": string(item, "call_id", at), "content": content})
            case _:
                raise bad_request(f"{at}.type is {shown(kind)}; allowed: {ITEMS}", where)
    if any(reasoning):
        of_assistant()["content"] = ""
    return found


def continues_last(items: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last item is the beginning of an answer, which the model goes on with."""
    last = items[-1] if items else {}
    is_message = last.get("type", "message") == "message" and last.get("role") == "assistant"
    return is_message and last.get("status") in UNFINISHED


def _role(item: Mapping[str, Any], at: str) -> str:
    role = item.get("role")
    if role not in ROLES:
        raise bad_request(f"{at}.role is {shown(role)}; allowed: {', '.join(ROLES)}", "input")
    return "system" if role == "developer" else str(role)  # templates know the former


def _text(content: Any, at: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{at} must be a string or a list of parts, not {type(content).__name__}", "input")
    texts = []
    for index, given in enumerate(content):
        part, kind = kind_of(given, f"{at}[{index}]", ", ".join(TEXTS))
        if kind not in TEXTS:
            raise bad_request(f"{at}[{index}].type is {shown(kind)}; allowed: {', '.join(TEXTS)}", "input")
        texts.append(string(part, TEXTS[kind], f"{at}[{index}]"))
    return "\n".join(texts)


def _reasoning(item: Mapping[str, Any], at: str) -> str:
    texts = []
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list):
            raise bad_request(f"{at}.{name} must be a list, not {type(parts).__name__}", "input")
        texts = [
            string(kind_of(part, f"{at}.{name}[{i}]", "reasoning_text, summary_text")[0], "text", f"{at}.{name}[{i}]")
            for i, part in enumerate(parts)
        ]
        if texts:
            return "\n".join(texts)
    if item.get("encrypted_content"):
        raise bad_request(f"{at}.encrypted_content cannot be read here; send the reasoning's content", "input")
    return ""
