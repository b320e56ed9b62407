"""Renders chat messages, as in the OpenAI API, into a prompt."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import nodes

from quire.config.shown import shown
from quire.engine.input_processor import ParsedPrompt
from quire.tokenizer.chat_template import Marks, parse_template, render_chat
from quire.tokenizer.tokenizer import Tokenizer

TEXT_PARTS = {"text", "input_text", "output_text"}
FORMS = {"string": (False, True), "openai": (True, False)}  # accepts lists of parts, accepts strings


class ChatRenderer:
    """Renders conversations with a tokenizer's chat template, or with the user's own."""

    def __init__(self, tokenizer: Tokenizer, chat_template: str | None = None, content_format: str = "auto") -> None:
        self.tokenizer = tokenizer
        self.content_format = content_format
        self.template = read_template(chat_template) if chat_template is not None else tokenizer.chat_template
        ids = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_id}
        self.special_tokens = {n: str(tokenizer.backend.id_to_token(i)) for n, i in ids.items() if i is not None}

    def prompts(self, conversations: Sequence[Sequence[Any]], **options: Any) -> list[ParsedPrompt]:
        """Render and tokenize. The template writes the special tokens, so the tokenizer adds none."""
        texts = [self.render(messages, **options) for messages in conversations]
        encoded = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return [ParsedPrompt(text, ids) for text, ids in zip(texts, encoded, strict=True)]

    def render(
        self,
        messages: Sequence[Any],
        *,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        content_format: str | None = None,
        marks: Marks | None = None,
    ) -> str:
        """`chat_template` is Jinja text, never a path: it may come from a client. `content_format` is the renderer's
        unless given."""
        template = self.template if chat_template is None else chat_template
        if template is None:
            raise ValueError(
                "the model has no chat template (a base model?); give one with --chat-template FILE or "
                "chat_template=..., or use plain prompts"
            )
        return render_chat(
            normalize_messages(messages, template, content_format or self.content_format),
            template,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
            special_tokens=self.special_tokens,
            marks=marks,
        )


@lru_cache(maxsize=64)
def read_template(given: str) -> str:
    """A template is recognised by Jinja's braces or a line break; anything else names a file."""
    if "{%" in given or "{{" in given or "\n" in given:
        return given
    path = Path(given).expanduser()
    if not path.is_file():
        raise ValueError(f"chat_template {given!r} is neither a file nor a Jinja template")
    return path.read_text(encoding="utf-8")


def normalize_messages(messages: Sequence[Any], template: str, wanted: str = "auto") -> list[dict[str, Any]]:
    """Check each message, and give the template its content as a `string`, as `openai`'s list of parts, or in the form
    that it expects (`auto`)."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise ValueError(f"messages must be a list of {{role, content}} objects, not {type(messages).__name__}")
    if wanted not in ("auto", *FORMS):
        raise ValueError(f"chat_template_content_format is {wanted!r}; allowed: auto, {', '.join(FORMS)}")
    accepts_parts, accepts_strings = FORMS[wanted] if wanted in FORMS else content_format(template)
    normal = []
    for index, given in enumerate(messages):
        message = _as_dict(given, f"messages[{index}]")
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            parts = [_text_part(part, f"messages[{index}].content[{i}]") for i, part in enumerate(content)]
            message["content"] = parts if accepts_parts else "\n".join(part["text"] for part in parts)
        elif isinstance(content, str) and not accepts_strings:
            message["content"] = [{"type": "text", "text": content}]
        elif content is None:  # only tool calls; many templates concatenate content anyway
            message["content"] = "" if accepts_strings else []
        if message.get("tool_calls"):
            calls = enumerate(message["tool_calls"])
            message["tool_calls"] = [_checked_call(call, f"messages[{index}].tool_calls[{i}]") for i, call in calls]
        normal.append(message)
    return normal


@lru_cache(maxsize=64)
def content_format(template: str) -> tuple[bool, bool]:
    """Whether a template accepts content as a list of parts (it loops over it), and as a string (all do, except those
    that loop over it without testing its type)."""
    tree = parse_template(template)
    names = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, names):
            names.add(assign.target.name)
    loops = any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))
    tests_type = any(test.name in ("string", "iterable", "mapping", "sequence") for test in tree.find_all(nodes.Test))
    return loops, not loops or tests_type


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Filter) and node.node is not None:
        return node.name in ("list", "selectattr", "rejectattr", "default") and _is_content(node.node, names)
    return isinstance(node, nodes.Name) and node.name in names


def _as_dict(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) and callable(getattr(message, "model_dump", None)):
        message = message.model_dump(exclude_none=True)  # a message object of the openai client
    if not isinstance(message, Mapping):
        raise ValueError(f"{where} must be an object with role and content, not {type(message).__name__}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where} needs a role: system, user, assistant, tool, or another role of the chat template")
    message = dict(message)
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        # Templates and clients differ in the name.
        message["reasoning_content"] = message["reasoning"] = reasoning
        content = message["content"] = "" if content is None else content
    if content is None and not message.get("tool_calls"):
        raise ValueError(f"{where} needs content: a string, or a list of text parts")
    if content is not None and not isinstance(content, (str, list, tuple)):
        raise ValueError(f"{where}.content must be a string or a list of parts, not {type(content).__name__}")
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, (list, tuple)):
        raise ValueError(f"{where}.tool_calls must be a list, not {type(calls).__name__}")
    return message


def _text_part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise ValueError(f"{where} must be an object like {{'type': 'text', 'text': ...}}")
    kind = part.get("type", "text")
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise ValueError(f"{where} is of type {shown(kind)}; only text is supported so far")
    if not isinstance(part.get("text"), str):
        raise ValueError(f"{where} needs a text")
    return {**part, "type": "text"}  # some templates read more of a part, such as a language


def _checked_call(call: Any, where: str) -> dict[str, Any]:
    """The API carries a tool call's arguments as JSON text; templates expect the object."""
    call = dict(call) if isinstance(call, Mapping) else {}
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where} must be an object with id, type and function: {{name, arguments}}")
    if not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
