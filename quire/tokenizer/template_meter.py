"""The budget of one rendering of a chat template, and the checks that keep an operation from exceeding it.

Everything that can repeat or grow something (loops, calls, filters, operators, literals, output) is charged for the
size of its result, and the few operations whose result may be far larger than their arguments are checked beforehand.
"""

import re
import time
from typing import Any

import jinja2

MAX_SECONDS = 3.0
# The base budget; a conversation adds to it in proportion to its length.
BASE_CHARS = 4_000_000  # in one value, or in the output
BASE_WORK = 5_000_000
CHARS_PER_INPUT = 8
WORK_PER_INPUT = 100
MAX_WIDTH = 100_000  # of padding, indentation and the like
MAX_BITS = 20_000  # of a whole number


def input_weight_of(value: Any) -> int:
    """Size of JSON values, in characters and containers: what the budget is in proportion to."""
    if isinstance(value, str):
        return 1 + len(value)
    if isinstance(value, dict):
        return 1 + sum(len(key) + input_weight_of(item) for key, item in value.items())
    return 1 + sum(map(input_weight_of, value)) if isinstance(value, list) else 1


class TemplateLimitError(jinja2.TemplateError):
    """The template exceeded its budget."""


class Meter:
    """The budget that one rendering has left."""

    def __init__(self, input_weight: int) -> None:
        self.max_chars = BASE_CHARS + CHARS_PER_INPUT * input_weight
        self.work_left = BASE_WORK + WORK_PER_INPUT * input_weight
        self.deadline = time.monotonic() + MAX_SECONDS
        # Containers cannot change in this sandbox, so each is weighed once, and kept alive lest its id be reused.
        self.weights: dict[int, tuple[Any, int]] = {}

    def charge(self, work: int) -> None:
        self.work_left -= work
        if self.work_left < 0:
            raise TemplateLimitError("it does far more work than its messages call for (a loop without an end?)")
        if time.monotonic() > self.deadline:
            raise TemplateLimitError(f"it ran for more than {MAX_SECONDS:g} seconds")

    def accept(self, value: Any) -> Any:
        """Charge for a value that was just made, and return it."""
        if isinstance(value, (str, bytes)):
            self.charge(1 + len(value))
            self.check_size(len(value))
        elif isinstance(value, (list, tuple, dict, set, frozenset)):
            self.charge(1 + len(value))
            self.check_size(self.weigh(value))
        else:
            if type(value) is int and value.bit_length() > MAX_BITS:
                raise TemplateLimitError("it computes a number that is too large")
            self.charge(1)
        return value

    def check_size(self, size: int) -> None:
        if size > self.max_chars:
            raise TemplateLimitError(f"it builds a value of more than {self.max_chars} characters")

    def weigh(self, value: Any) -> int:
        """Size when rendered as text: shared parts count each time, or a few nested pairs would hide a huge text."""
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


# Methods and filters that pad to a width: the result may be far larger than the arguments.
_PADDING = {"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes", "batch", "slice", "round", "truncate"}


def check_operator(meter: Meter, operator: str, left: Any, right: Any) -> None:
    if operator == "*":
        for many, times in ((left, right), (right, left)):
            if isinstance(times, int) and not isinstance(many, (int, float)):
                meter.check_size(meter.weigh(many) * max(times, 0))
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        if left.bit_length() * abs(right) > MAX_BITS:
            raise TemplateLimitError("it computes a number that is too large")
    elif operator == "%" and isinstance(left, (str, bytes)):
        _check_percent_format(left)


def check_method(meter: Meter, name: str, owner: Any, args: list[Any]) -> None:
    if name in _PADDING:
        if any(isinstance(arg, int) and abs(arg) > MAX_WIDTH for arg in args):
            raise TemplateLimitError(f"{name} is given a number above {MAX_WIDTH}")
    elif name in ("format", "format_map"):
        if re.search(r"\d{5}|\{[^{}]*\{", owner):
            raise TemplateLimitError("a format has a width that is too large, or computed")
    elif name == "replace" and len(args) > 1 and isinstance(args[0], (str, bytes)):
        meter.check_size(owner.count(args[0]) * meter.weigh(args[1]))
    elif name == "join" and args:
        meter.check_size(_count(args[0]) * len(owner))
    elif name == "translate" and args:
        meter.check_size(len(owner) * meter.weigh(args[0]))


def check_filter(meter: Meter, name: str, value: Any, args: list[Any]) -> None:
    if name == "format":
        _check_percent_format(str(value))
    elif name == "join":
        separator = args[0] if args and isinstance(args[0], str) else ""
        meter.check_size(_count(value) * len(separator))
    elif name == "indent":
        width = next((len(a) if isinstance(a, str) else a for a in args if not isinstance(a, bool)), 4)
        meter.check_size((str(value).count("\n") + 1) * width)
    elif name in ("replace", *_PADDING):
        check_method(meter, name, str(value) if name == "replace" else value, args)


def _check_percent_format(text: Any) -> None:
    pattern = r"%[^a-zA-Z%]*(\d{5}|\*)"
    if re.search(pattern if isinstance(text, str) else pattern.encode(), text):
        raise TemplateLimitError("a format has a width that is too large, or computed")


def _count(items: Any) -> int:
    return len(items) if hasattr(items, "__len__") else MAX_WIDTH  # a generator: no range is longer
