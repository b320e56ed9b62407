"""The Jinja sandbox that chat templates run in: what they may call, each operation charged to a meter.

A template comes with a model from the internet. Jinja's sandbox keeps it from Python's internals; the meter
(template_meter.py) ends an endless or exploding template with an error, wherever it does its work, so that no watchdog
thread or process is needed.
"""

import functools
import json
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from quire.tokenizer.template_meter import Meter, TemplateLimitError, check_filter, check_method, check_operator

METER = "meter!"  # the variable that holds it while rendering: a name that no template can spell
MARKS = "marks!"  # the variable that holds the marks around the assistant's words, where they are asked for
MAX_JSON_INDENT = 64


@functools.cache
def sandbox_environment() -> ImmutableSandboxedEnvironment:
    environment = _SandboxEnvironment(
        trim_blocks=True, lstrip_blocks=True, finalize=_output, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    # No prompt needs them, and their output can be far larger than their input.
    for name in ("urlize", "wordwrap", "xmlattr", "pprint"):
        del environment.filters[name]
    del environment.globals["lipsum"]
    for name, function in list(environment.filters.items()):
        environment.filters[name] = _charged(name, function)
    environment.filters |= {"iteration!": _iteration, "concat!": _concat, "literal!": _literal, "mark!": _mark}
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _make_dict,
        "namespace": _Namespace,
    }
    return environment


class _SandboxEnvironment(ImmutableSandboxedEnvironment):
    # No constant folding: no meter runs while a template is compiled.
    optimized = False
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _ChargeInserter().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter: Meter = context.parent[METER]
        check_operator(meter, operator, left, right)
        return meter.accept(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter: Meter = __context.parent[METER]
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, (str, bytes, int)):
            check_method(meter, method.__name__, owner, [*args, *kwargs.values()])
        return meter.accept(super().call(__context, __obj, *args, **kwargs))


class _ChargeInserter(NodeTransformer):
    """Charges a template for each iteration of a loop, for `~`, and for list and dict literals."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        text = _literal_chars(node.body)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_filter(nodes.Const(1 + text), "iteration!")))
        if node.test is not None:  # iterations that the test skips
            node.test = nodes.And(_filter(nodes.Const(1), "iteration!"), node.test)
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


def _literal_chars(body: list[nodes.Node]) -> int:
    """Characters of literal text that one iteration of a loop may output, nested loops not counted."""
    total, open_nodes = 0, list(body)
    while open_nodes:
        node = open_nodes.pop()
        if isinstance(node, nodes.TemplateData):
            total += len(node.data)
        elif not isinstance(node, nodes.For):
            open_nodes.extend(node.iter_child_nodes())
    return total


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; a scope, and marks where they are asked for."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, end = (nodes.Output([_filter(nodes.Const(which), "mark!")]) for which in (0, 1))
        return nodes.Scope([start, *body, end]).set_lineno(line, override=False)


class _Namespace(Namespace):
    """Jinja's namespace without private names, whose text omits its contents, which may be circular."""

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
        raise TemplateLimitError("strftime_now is given a width")
    return datetime.now().strftime(format)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    for part in (indent, *(separators or ())):
        size = len(part) if isinstance(part, str) else part
        if isinstance(size, int) and size > MAX_JSON_INDENT:
            raise TemplateLimitError(
                f"tojson is given an indentation or separator of more than {MAX_JSON_INDENT} characters"
            )
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _charged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, charged for its result. It takes the context, so Jinja cannot run it while compiling either."""
    passed = str(getattr(function, "jinja_pass_arg", ""))

    @pass_context
    def charged(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter: Meter = context.parent[METER]
        check_filter(meter, name, value, [*args, *kwargs.values()])
        if passed.endswith("environment"):
            result = function(context.environment, value, *args, **kwargs)
        elif passed.endswith("eval_context"):
            result = function(context.eval_ctx, value, *args, **kwargs)
        elif passed.endswith("context"):
            result = function(context, value, *args, **kwargs)
        else:
            result = function(value, *args, **kwargs)
        return meter.accept(result)

    return charged


@pass_context
def _iteration(context: Context, cost: int) -> bool:
    context.parent[METER].charge(cost)
    return True


@pass_context
def _concat(context: Context, values: list[Any]) -> str:
    meter: Meter = context.parent[METER]
    meter.check_size(sum([meter.weigh(value) for value in values]))
    text: str = meter.accept("".join(map(str, values)))
    return text


@pass_context
def _mark(context: Context, which: int) -> str:
    marks: tuple[str, str] | None = context.parent.get(MARKS)
    return "" if marks is None else marks[which]


@pass_context
def _literal(context: Context, value: Any) -> Any:
    return context.parent[METER].accept(value)


@pass_context
def _output(context: Context, value: Any) -> Any:
    meter: Meter = context.parent[METER]
    meter.charge(len(value) if isinstance(value, str) else meter.weigh(value))
    return value
