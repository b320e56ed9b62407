"""Command-line flags made from the config dataclasses: a new config field is a new flag, with help and choices."""

import argparse
import dataclasses
import difflib
import json
import typing
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

from quire.config.engine import EngineConfig
from quire.config.fields import FieldInfo, flag, options

SIZE_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class FlagParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, and which suggests the nearest flag for an unknown one."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)  # an abbreviation would change meaning when a flag is added
        kwargs.setdefault("formatter_class", lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110))
        kwargs.setdefault("usage", "%(prog)s [MODEL] [flags]")  # the list of all flags follows anyway
        super().__init__(**kwargs)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse flags and positionals in any order; anything left over is an error."""
        # parse_args considers an optional positional absent if a flag precedes it.
        args, unknown = self.parse_known_intermixed_args(argv)
        if unknown:
            self.error(self._unknown_message(unknown))
        self._check_model(args)
        return args

    def _check_model(self, args: argparse.Namespace) -> None:
        """`--api-key KEY ORG/MODEL` must not serve the default model with the model's name as a key."""
        takes_model = any(action.dest == "model" and not action.option_strings for action in self._actions)
        if not takes_model or hasattr(args, "model"):
            return
        for action in self._actions:
            values = getattr(args, action.dest, None)
            if isinstance(action, Several) and action.nargs and values is not None and len(values) > 1:
                last = values[-1]
                if "/" in last or last.endswith(".gguf") or Path(last).exists():
                    taken = f"{action.option_strings[0]} took {last!r} as one of its values"
                    self.error(f"{taken}; write the model before it, or as --model")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"quire: error: {message}\nsee {self.prog} --help\n")

    def _unknown_message(self, unknown: list[str]) -> str:
        flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        if not flags:
            return f"unexpected argument {unknown[0]!r}"
        known = [name for name in self._option_string_actions if name.startswith("--")]
        near = difflib.get_close_matches(flags[0].replace("_", "-"), known, n=1)
        return f"unknown flag {flags[0]}" + (f"; did you mean {near[0]}?" if near else "")


class Several(argparse.Action):
    """Collects the values of a flag that may be given several times, with one or more values each."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        new = [each for value in (values if self.nargs else [values]) for each in _as_list(value)]
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, []), *new])


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def add_engine_flags(parser: argparse.ArgumentParser, leave_out: Collection[str] = ()) -> None:
    """Add a flag for every engine option, one group per config class, except the options named in `leave_out`."""
    for config in EngineConfig.parts().values():
        group = parser.add_argument_group((config.__doc__ or config.__name__).strip().rstrip("."))
        types = typing.get_type_hints(config)
        defaults = {field.name: field.default for field in dataclasses.fields(config)}
        for name, info in options(config).items():
            if name not in leave_out:
                add_flag(group, name, info, types[name], defaults[name])


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Also accept the model as a positional argument, beside the --model of `add_engine_flags`."""
    parser.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help="the same as --model")


def engine_kwargs(args: argparse.Namespace, leave_out: Collection[str] = ()) -> dict[str, Any]:
    """The engine options that the user gave, ready for `EngineConfig.from_kwargs` or `LLM`."""
    names = [name for config in EngineConfig.parts().values() for name in options(config) if name not in leave_out]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def size(text: str) -> int:
    """Bytes from `4G`, `512M`, `1.5K` or a plain number; units are powers of 1024."""
    unit = SIZE_UNITS.get(text[-1:].upper())
    try:
        return int(float(text[:-1]) * unit) if unit else int(text)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write a number, or one with K, M, G or T") from None


def integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object; write {{...}}")
    return value


def text_list(text: str) -> str | list[str]:
    """One text, or several as a JSON list: `["a", "b"]`."""
    if not text.startswith("["):
        return text
    try:
        values = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not all(isinstance(value, str) for value in values):
        raise argparse.ArgumentTypeError(f'{text!r} is not a list of texts; write ["...", "..."]')
    return values


def add_flag(group: argparse._ArgumentGroup, name: str, info: FieldInfo, annotation: Any, default: Any) -> None:
    # A flag that was not given is absent from the namespace, so that the config keeps its default.
    common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": _help(info, default)}
    if annotation is bool:
        group.add_argument(flag(name), action=argparse.BooleanOptionalAction, **common)
    elif typing.get_origin(annotation) is tuple:
        how = {"many": "several may be given", "json": "may be given several times, or as a JSON list"}
        common["help"] = f"{info.help}; {how.get(info.several, 'may be given several times')}".replace("%", "%%")
        if info.several == "many":
            common["nargs"] = "+"
        common["type"] = text_list if info.several == "json" else str
        group.add_argument(flag(name), action=Several, metavar="TEXT", **common)
    elif info.choices is not None:
        group.add_argument(flag(name), choices=info.choices, type=_parser_for(name, annotation), **common)
    else:
        metavar, parse = _metavar(name, annotation), _or_word(info.words, _parser_for(name, annotation))
        group.add_argument(flag(name), type=parse, metavar=metavar, **common)


def _help(info: FieldInfo, default: Any) -> str:
    shown = {True: "on", False: "off"}[default] if isinstance(default, bool) else default
    text = info.help if default is None else f"{info.help} (default: {shown})"
    return text.replace("%", "%%")


def _plain_types(annotation: Any) -> tuple[Any, ...]:
    """The types a value may have: `int | None` gives (int,)."""
    return tuple(t for t in typing.get_args(annotation) if t is not type(None)) or (annotation,)


def _is_object(types: tuple[Any, ...]) -> bool:
    return any(typing.get_origin(kind) is dict for kind in types)


def _parser_for(name: str, annotation: Any) -> Callable[[str], Any]:
    parsers: dict[Any, Callable[[str], Any]] = {int: integer, float: number, str: str}
    types = _plain_types(annotation)
    if types == (int,) and name.endswith("_bytes"):
        return size
    if _is_object(types):
        return json_object
    unsupported = [t for t in types if t not in parsers]
    if unsupported:
        raise TypeError(f"{flag(name)}: no flag can be made from type {unsupported[0]}; use int, float, str or bool")
    if len(types) == 1:
        return parsers[types[0]]

    def first_that_fits(text: str) -> Any:
        # str fits everything, so it comes last.
        for kind in sorted(types, key=[int, float, str].index):
            try:
                return parsers[kind](text)
            except argparse.ArgumentTypeError as error:
                problem = error
        raise problem

    return first_that_fits


def _or_word(words: Collection[str], parse: Callable[[str], Any]) -> Callable[[str], Any]:
    return (lambda text: text if text in words else parse(text)) if words else parse


def _metavar(name: str, annotation: Any) -> str:
    types = _plain_types(annotation)
    if types == (int,) and name.endswith("_bytes"):
        return "SIZE"
    if _is_object(types):
        return "JSON"
    return {int: "N", float: "X"}.get(types[0], "TEXT")
