"""Chat templates: messages to the text a model was trained on, as transformers' apply_chat_template renders it."""

import functools
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes

from quire.tokenizer.template_meter import Meter, TemplateLimitError, input_weight_of
from quire.tokenizer.template_sandbox import MARKS, METER, GenerationTag, sandbox_environment

MAX_SOURCE_CHARS = 1_000_000
CONTINUE = "\ue000\ue001continue\ue001\ue000"  # private-use characters: no message contains them by accident
Marks = tuple[str, str]  # of the beginning and the end
Messages = Sequence[Mapping[str, Any]]


def render_chat(
    messages: Messages,
    template: str,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    special_tokens: Mapping[str, str] | None = None,
    marks: Marks | None = None,
) -> str:
    """The prompt of a conversation. `special_tokens` are names for the template, such as {"bos_token": "<s>"}.

    With `continue_final_message` the prompt ends where the last message's text ends, for the model to continue it.
    With `marks`, a pair from `new_marks`, what the template has within `{% generation %}` stands between them.
    """
    if continue_final_message and add_generation_prompt:
        raise ValueError(
            "add_generation_prompt begins a new message and continue_final_message goes on with the last one; use one"
        )
    if not messages:
        raise ValueError("the conversation is empty; give at least one message")
    compiled = compile_template(template)
    try:
        variables = {
            "documents": None,
            **(special_tokens or {}),
            **_as_json(template_kwargs or {}),
            "messages": _as_json(list(messages)),
            "tools": _as_json(list(tools)) if tools is not None else None,
            "add_generation_prompt": add_generation_prompt,
            MARKS: marks,
        }
        if continue_final_message:
            _mark_end(variables["messages"][-1])
        text = _render(compiled, variables)
    except RecursionError:
        raise ValueError("the chat template or its messages are nested too deeply") from None
    return _cut_at_mark(text) if continue_final_message else text


def new_marks() -> Marks:
    """Marks for one rendering. A client that could guess them could forge them; private-use characters have no case,
    and are no space, so that a template's filters leave them as they are."""
    start, end = ("".join(chr(0xE000 + secrets.randbelow(0x1900)) for _ in range(10)) for _ in range(2))
    return start, end


def without_marks(text: str, marks: Marks) -> tuple[str, list[tuple[int, int]]]:
    """A text rendered with marks, and where what they enclose begins and ends without them."""
    first, last = marks
    parts: list[str] = []
    spans: list[tuple[int, int]] = []
    at, start = 0, None
    for part in re.split(f"({first}|{last})", text):
        if part == first:
            start = at
        elif part == last and start is not None:
            spans.append((start, at))
            start = None
        elif part != last:
            parts.append(part)
            at += len(part)
    return "".join(parts), spans if start is None else [*spans, (start, at)]


@functools.lru_cache(maxsize=64)
def compile_template(source: str) -> jinja2.Template:
    if len(source) > MAX_SOURCE_CHARS:
        raise ValueError(f"the chat template has {len(source)} characters; at most {MAX_SOURCE_CHARS} are allowed")
    try:
        return sandbox_environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is not valid, line {error.lineno}: {error.message}") from error
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"the chat template cannot be compiled: {error}") from error


def parse_template(source: str) -> nodes.Template:
    """The syntax tree of a template as it was written."""
    try:
        return jinja2.Environment(extensions=["jinja2.ext.loopcontrols", GenerationTag]).parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is not valid, line {error.lineno}: {error.message}") from error


def _render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    meter = Meter(input_weight_of(variables))
    parts: list[str] = []
    length = 0
    try:
        for part in template.generate({**variables, METER: meter}):
            parts.append(part)
            length += len(part)
            if length > meter.max_chars:
                raise TemplateLimitError(f"its output passes {meter.max_chars} characters")
    except TemplateLimitError as error:
        raise ValueError(f"the chat template was stopped: {error}") from None
    except jinja2.TemplateSyntaxError:
        raise
    except jinja2.TemplateError as error:  # raise_exception() of the template among others
        raise ValueError(f"the chat template refused the messages: {error.message}") from error
    except RecursionError:
        raise
    except Exception as error:
        raise ValueError(f"the chat template failed: {type(error).__name__}: {error}") from error
    return "".join(parts)


def _mark_end(message: dict[str, Any]) -> None:
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + CONTINUE + " "
        return
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            part["text"] += CONTINUE + " "
            return
    raise ValueError("continue_final_message needs a last message with text to go on with")


def _cut_at_mark(text: str) -> str:
    at = text.rfind(CONTINUE)
    if at < 0:
        raise ValueError("continue_final_message: the chat template does not show the last message's text")
    # A template that trimmed the space behind the mark would have trimmed the message's own too.
    trimmed = not text.startswith(" ", at + len(CONTINUE))
    return text[:at].rstrip() if trimmed else text[:at]


def _as_json(value: Any) -> Any:
    """A copy made of JSON types alone, so that a template sees no object with methods of its own."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    for kind in (str, int, float):
        if isinstance(value, kind):  # an enum, for example
            return kind(value)
    dump = getattr(value, "model_dump", None)
    if callable(dump):  # pydantic, as the openai client returns
        return _as_json(dump(exclude_none=True))
    raise ValueError(f"messages and tools must be plain JSON values; got {type(value).__name__}")
