"""Chat templates: messages to the text a model was trained on, as transformers' apply_chat_template renders it.

A template comes with a model from the internet, so it runs in Jinja's sandbox and on a budget. Everything that can
repeat or grow something (loops, calls, filters, operators, literals, output) pays for the size of its result, and the
few operations whose result may be far larger than what they are given are checked beforehand. So an endless or
exploding template ends with an error, wherever it does its work; no watchdog thread or process is needed.
"""

import functools
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

MAX_SOURCE_CHARS = 1_000_000
MAX_SECONDS = 3.0
# Beside these a conversation brings an allowance of its own, in proportion to its length.
BASE_CHARS = 4_000_000  # of one value, or of the output
BASE_WORK = 5_000_000
CHARS_PER_INPUT = 8
WORK_PER_INPUT = 100
MAX_WIDTH = 100_000  # of padding, indentation and the like
MAX_BITS = 20_000  # of a whole number

CONTINUE = "\ue000\ue001continue\ue001\ue000"  # private-use characters: no message holds them by accident
METER = "meter!"  # a name that no template can spell
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
) -> str:
    """The prompt of a conversation. `special_tokens` are names for the template, such as {"bos_token": "<s>"}.

    With `continue_final_message` the prompt ends where the last message's text ends, for the model to go on with it.
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
            **_plain(template_kwargs or {}),
            "messages": _plain(list(messages)),
            "tools": _plain(list(tools)) if tools is not None else None,
            "add_generation_prompt": add_generation_prompt,
        }
        if continue_final_message:
            _mark_end(variables["messages"][-1])
        text = _render(compiled, variables)
    except RecursionError:
        raise ValueError("the chat template or its messages are nested too deeply") from None
    return _cut_at_mark(text) if continue_final_message else text


@functools.lru_cache(maxsize=64)
def compile_template(source: str) -> jinja2.Template:
    if len(source) > MAX_SOURCE_CHARS:
        raise ValueError(f"the chat template has {len(source)} characters; at most {MAX_SOURCE_CHARS} are allowed")
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is not valid, line {error.lineno}: {error.message}") from error
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"the chat template cannot be compiled: {error}") from error


def parse_template(source: str) -> nodes.Template:
    """The syntax tree of a template as it was written."""
    try:
        return jinja2.Environment(extensions=["jinja2.ext.loopcontrols", _GenerationTag]).parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is not valid, line {error.lineno}: {error.message}") from error


def _render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    meter = _Meter(_weight_of(variables))
    parts: list[str] = []
    length = 0
    try:
        for part in template.generate({**variables, METER: meter}):
            parts.append(part)
            length += len(part)
            if length > meter.max_chars:
                raise _TooMuch(f"its output passes {meter.max_chars} characters")
    except _TooMuch as error:
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


def _plain(value: Any) -> Any:
    """A copy made of plain JSON types, so that a template meets no object with methods of its own."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    for kind in (str, int, float):
        if isinstance(value, kind):  # an enum, for example
            return kind(value)
    dump = getattr(value, "model_dump", None)
    if callable(dump):  # pydantic, as the openai client returns
        return _plain(dump(exclude_none=True))
    raise ValueError(f"messages and tools must be plain JSON values; got {type(value).__name__}")


def _weight_of(value: Any) -> int:
    if isinstance(value, str):
        return 1 + len(value)
    if isinstance(value, dict):
        return 1 + sum(len(key) + _weight_of(item) for key, item in value.items())
    return 1 + sum(map(_weight_of, value)) if isinstance(value, list) else 1


class _TooMuch(jinja2.TemplateError):
    pass


class _Meter:
    """What one rendering has used of its budget."""

    def __init__(self, input_weight: int) -> None:
        self.max_chars = BASE_CHARS + CHARS_PER_INPUT * input_weight
        self.work_left = BASE_WORK + WORK_PER_INPUT * input_weight
        self.deadline = time.monotonic() + MAX_SECONDS
        # Containers cannot change in this sandbox, so each is weighed once. It is kept, or its id could be used again.
        self.weights: dict[int, tuple[Any, int]] = {}

    def charge(self, work: int) -> None:
        self.work_left -= work
        if self.work_left < 0:
            raise _TooMuch("it does far more work than its messages call for (a loop without an end?)")
        if time.monotonic() > self.deadline:
            raise _TooMuch(f"it ran for more than {MAX_SECONDS:g} seconds")

    def accept(self, value: Any) -> Any:
        """Pay for a value that was just made."""
        if isinstance(value, (str, bytes)):
            self.charge(1 + len(value))
            self.check_size(len(value))
        elif isinstance(value, (list, tuple, dict, set, frozenset)):
            self.charge(1 + len(value))
            self.check_size(self.weigh(value))
        else:
            if type(value) is int and value.bit_length() > MAX_BITS:
                raise _TooMuch("it computes a number that is too large")
            self.charge(1)
        return value

    def check_size(self, size: int) -> None:
        if size > self.max_chars:
            raise _TooMuch(f"it builds a value of more than {self.max_chars} characters")

    def weigh(self, value: Any) -> int:
        """Size when written out: shared parts count each time, or a few nested pairs would hide a huge text."""
        if isinstance(value, (str, bytes)):
            return 1 + len(value)
        if not isinstance(value, (list, tuple, dict, set, frozenset)):
            return 1
        known = self.weights.get(id(value))
        if known is not None:
            return known[1]
        items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        weight = 1 + sum([self.weigh(item) for item in items])
        self.weights[id(value)] = value, weight
        return weight


class _Environment(ImmutableSandboxedEnvironment):
    # Nothing of a template is computed while it is compiled: no meter runs then.
    optimized = False
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Metered().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter: _Meter = context.parent[METER]
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(times, int) and not isinstance(many, (int, float)):
                    meter.check_size(meter.weigh(many) * max(times, 0))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * abs(right) > MAX_BITS:
                raise _TooMuch("it computes a number that is too large")
        elif operator == "%" and isinstance(left, (str, bytes)):
            _check_percent_format(left)
        return meter.accept(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter: _Meter = __context.parent[METER]
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, (str, bytes, int)):
            _check_method(meter, method.__name__, owner, [*args, *kwargs.values()])
        return meter.accept(super().call(__context, __obj, *args, **kwargs))


class _Metered(NodeTransformer):
    """Makes a template pay: for each turn of a loop, for `~`, and for lists and dicts it writes down."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        text = _text_in(node.body)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_filter(nodes.Const(1 + text), "turn!")))
        if node.test is not None:  # turns that the test skips
            node.test = nodes.And(_filter(nodes.Const(1), "turn!"), node.test)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes), "concat!")

    def _visit_literal(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load" or all(isinstance(n, nodes.Const) for n in node.iter_child_nodes()):
            return node
        return _filter(node, "literal!")

    visit_List = visit_Tuple = visit_Dict = _visit_literal


def _filter(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None)


def _text_in(body: list[nodes.Node]) -> int:
    """Characters of literal text that one turn of a loop may write, not counting loops within."""
    total, open_nodes = 0, list(body)
    while open_nodes:
        node = open_nodes.pop()
        if isinstance(node, nodes.TemplateData):
            total += len(node.data)
        elif not isinstance(node, nodes.For):
            open_nodes.extend(node.iter_child_nodes())
    return total


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Namespace(Namespace):
    """Jinja's namespace without private names, and without its contents in its text, which may be circular."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        for name in dict(*rest, **kwargs):
            _check_name(name)
        Namespace.__init__(self, *rest, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a chat template may not set {name!r} of a namespace")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    if re.search(r"\d{3}", format):
        raise _TooMuch("strftime_now is given a width")
    return datetime.now().strftime(format)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as it is, where Jinja's own filter would escape it for HTML."""
    for part in (indent, *(separators or ())):
        if (isinstance(part, int) and part > 64) or (isinstance(part, str) and len(part) > 64):
            raise _TooMuch("tojson is given an indentation or separator of more than 64 characters")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


# What a method or filter of this name makes may be far larger than what it is given.
_PADDING = {"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes", "batch", "slice", "round", "truncate"}


def _check_method(meter: _Meter, name: str, owner: Any, args: list[Any]) -> None:
    if name in _PADDING:
        if any(isinstance(arg, int) and abs(arg) > MAX_WIDTH for arg in args):
            raise _TooMuch(f"{name} is given a number above {MAX_WIDTH}")
    elif name in ("format", "format_map"):
        if re.search(r"\d{5}|\{[^{}]*\{", owner):
            raise _TooMuch("a format has a width that is too large, or computed")
    elif name == "replace" and len(args) > 1 and isinstance(args[0], (str, bytes)):
        meter.check_size(owner.count(args[0]) * meter.weigh(args[1]))
    elif name == "join" and args:
        meter.check_size(_count(args[0]) * len(owner))
    elif name == "translate" and args:
        meter.check_size(len(owner) * meter.weigh(args[0]))


def _count(items: Any) -> int:
    return len(items) if hasattr(items, "__len__") else MAX_WIDTH  # a generator: no range is longer


def _check_percent_format(text: Any) -> None:
    pattern = r"%[^a-zA-Z%]*(\d{5}|\*)"
    if re.search(pattern if isinstance(text, str) else pattern.encode(), text):
        raise _TooMuch("a format has a width that is too large, or computed")


def _check_filter(meter: _Meter, name: str, value: Any, args: list[Any]) -> None:
    if name == "format":
        _check_percent_format(str(value))
    elif name == "join":
        separator = args[0] if args and isinstance(args[0], str) else ""
        meter.check_size(_count(value) * len(separator))
    elif name == "indent":
        width = next((len(a) if isinstance(a, str) else a for a in args if not isinstance(a, bool)), 4)
        meter.check_size((str(value).count("\n") + 1) * width)
    elif name in ("replace", *_PADDING):
        _check_method(meter, name, str(value) if name == "replace" else value, args)


def _pay_for(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that pays for its result. It asks for the context, so Jinja cannot run it while compiling either."""
    wants = str(getattr(function, "jinja_pass_arg", ""))

    @pass_context
    def paying(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter: _Meter = context.parent[METER]
        _check_filter(meter, name, value, [*args, *kwargs.values()])
        if wants.endswith("environment"):
            result = function(context.environment, value, *args, **kwargs)
        elif wants.endswith("eval_context"):
            result = function(context.eval_ctx, value, *args, **kwargs)
        elif wants.endswith("context"):
            result = function(context, value, *args, **kwargs)
        else:
            result = function(value, *args, **kwargs)
        return meter.accept(result)

    return paying


@pass_context
def _turn(context: Context, cost: int) -> bool:
    context.parent[METER].charge(cost)
    return True


@pass_context
def _concat(context: Context, values: list[Any]) -> str:
    meter: _Meter = context.parent[METER]
    meter.check_size(sum([meter.weigh(value) for value in values]))
    text: str = meter.accept("".join(map(str, values)))
    return text


@pass_context
def _literal(context: Context, value: Any) -> Any:
    return context.parent[METER].accept(value)


@pass_context
def _output(context: Context, value: Any) -> Any:
    meter: _Meter = context.parent[METER]
    meter.charge(len(value) if isinstance(value, str) else meter.weigh(value))
    return value


@functools.cache
def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, finalize=_output, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    # Nothing a prompt needs, and they can write far more than they are given.
    for name in ("urlize", "wordwrap", "xmlattr", "pprint"):
        del environment.filters[name]
    del environment.globals["lipsum"]
    for name, function in list(environment.filters.items()):
        environment.filters[name] = _pay_for(name, function)
    environment.filters |= {"turn!": _turn, "concat!": _concat, "literal!": _literal}
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _make_dict,
        "namespace": _Namespace,
    }
    return environment
