"""Command-line flags made from the config dataclasses: a new config field is a new flag, with help and choices."""

import argparse
import dataclasses
import difflib
import json
import logging
import re
import typing
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

from quire.config.engine import EngineConfig
from quire.config.fields import FieldInfo, flag, is_optional, options, refused_choice
from quire.config.vllm.choices import to_come
from quire.config.vllm.syntax import human_integer, normalized, read_config_file
from quire.config.vllm.table import TABLE

logger = logging.getLogger("quire")

HIDDEN = "vllm."  # before the names of flags that are only in vLLM's table


class FlagParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, and which suggests the nearest flag for an unknown one."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)  # an abbreviation would change meaning when a flag is added
        kwargs.setdefault("formatter_class", lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110))
        kwargs.setdefault("usage", "%(prog)s [MODEL] [flags]")  # the list of all flags follows anyway
        super().__init__(**kwargs)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse flags and positionals in any order; anything left over is an error."""
        with_engine = self.is_flag("--config")
        if with_engine:
            add_table_flags(self)
        try:
            words, file = _config_file(list(argv)) if with_engine else (list(argv), None)
            found = self._from_file(file)
            words = normalized(words, self.is_flag, self._objects(found))
            args = self._parsed(words, found)
        except (ValueError, OSError) as error:
            self.error(str(error))
        self._check_model(args, words)
        return args

    def is_flag(self, word: str) -> bool:
        return word in self._option_string_actions

    def _how_many(self, word: str) -> str:
        action = self._option_string_actions.get(word)
        if action is not None and action.nargs in ("+", "*"):
            return "many"
        return "several" if isinstance(action, Several) else "one"

    def _parsed(self, words: list[str], namespace: argparse.Namespace) -> argparse.Namespace:
        # parse_args considers an optional positional absent if a flag precedes it.
        args, unknown = self.parse_known_intermixed_args(words, namespace)
        if unknown:
            self.error(self._unknown_message(unknown))
        return args

    def _from_file(self, file: str | None) -> argparse.Namespace:
        """The values of --config. Those that are lists become tuples, which the command line replaces."""
        if file is None:
            return argparse.Namespace()
        required = [action for action in self._actions if action.required]
        for action in required:
            action.required = False
        found = self._parsed(normalized(read_config_file(file, self._how_many), self.is_flag), argparse.Namespace())
        for action in required:
            action.required = True
        given = {name: value for name, value in vars(found).items() if value != self.get_default(name)}
        lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        return argparse.Namespace(**(given | lists))

    def _objects(self, found: argparse.Namespace) -> dict[str, dict[str, Any]]:
        """The flags that have an object, by their names."""
        given = {name: value for name, value in vars(found).items() if isinstance(value, dict)}
        return {a.option_strings[0]: given[a.dest] for a in self._actions if a.option_strings and a.dest in given}

    def _check_model(self, args: argparse.Namespace, words: list[str]) -> None:
        """`--api-key KEY MODEL` must not serve the default model with the model's name as a key, or say so where the
        name could be a key as well."""
        takes_model = any(action.dest == "model" and not action.option_strings for action in self._actions)
        if not takes_model or hasattr(args, "model"):
            return
        values: list[str] = []
        for at, word in enumerate([*words, "--"]):
            if not self._starts_flag(word):
                values.append(word)
                continue
            if len(values) > 2 and self._how_many(values[0]) == "many" and _may_be_name(values[-1]):
                write = "write the model before it, or as --model"
                if at == len(words) or _looks_like_model(values[-1]):
                    taken = f"{values[0]} took {values[-1]!r} as one of its values, and no model is named"
                    self.error(f"{taken}; {write}")
                count = len(values) - 1
                logger.warning(
                    "no model is named, so the default is used: all %d words behind %s are its values; %s if one is it",
                    *(count, values[0], write),
                )
            values = [word]

    def _starts_flag(self, word: str) -> bool:
        return word == "--" or self.is_flag(word.partition("=")[0])

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
        before = getattr(namespace, self.dest, [])
        setattr(namespace, self.dest, [*(before if isinstance(before, list) else []), *new])


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _may_be_name(word: str) -> bool:
    """A model's: not a number, a pattern, a `name=path` or an object, which are values of flags alone."""
    return "*" not in word and not re.match(r"\d+$|[\w.:@+-]+=|\{", word)


def _looks_like_model(word: str) -> bool:
    return "/" in word or word.endswith(".gguf") or Path(word).is_dir()


def _config_file(words: list[str]) -> tuple[list[str], str | None]:
    """The words without --config, and its value."""
    files = [word.partition("=")[2] for word in words if word.startswith("--config=")]
    words = [word for word in words if not word.startswith("--config=")]
    while "--config" in words:
        at = words.index("--config")
        if at + 1 == len(words):
            raise ValueError("--config needs a value: a YAML file of flags")
        files.append(words[at + 1])
        del words[at : at + 2]
    if len(files) > 1:
        raise ValueError("--config is given more than once; one file is allowed")
    return words, files[0] if files else None


def add_table_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of vLLM that are no options here, so that each gets an answer of its own."""
    about = "these are accepted without effect, or refused with the feature to come: docs/compatibility.md"
    group = parser.add_argument_group("vLLM's other flags", about)
    parsers: dict[str, Callable[[str], Any]] = {"int": integer, "float": number, "json": json_value}
    for row in TABLE.values():
        name = flag(row.name)
        if row.kind == "option" or row.name.startswith("_") or name in parser._option_string_actions:
            continue
        common: dict[str, Any] = {"dest": HIDDEN + row.name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        if row.kind == "switch":
            group.add_argument(name, action=argparse.BooleanOptionalAction, **common)
        else:
            if row.kind == "texts":
                common["nargs"] = "*"
            group.add_argument(name, type=_or_none(parsers.get(row.kind, str)), **common)


def _or_none(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text == "None" else parse(text)


def _available(name: str, info: FieldInfo, parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Refuse a choice of vLLM's that is to come with its feature's name; argparse refuses other words."""

    def parsed(text: str) -> Any:
        if to_come(name, text):
            raise argparse.ArgumentTypeError(refused_choice(name, text, info))
        return parse(text)

    return parsed


def add_engine_flags(parser: argparse.ArgumentParser, leave_out: Collection[str] = ()) -> None:
    """Add a flag for every engine option, one group per config class, except the options named in `leave_out`."""
    text = "YAML file of flags; those of the command line have precedence"
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help=text)
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
    """The engine options that the user gave, and those of vLLM's table, for `EngineConfig.from_kwargs` or `LLM`."""
    names = [name for config in EngineConfig.parts().values() for name in options(config) if name not in leave_out]
    given = {name: getattr(args, name) for name in names if hasattr(args, name)}
    return given | {n.removeprefix(HIDDEN): value for n, value in vars(args).items() if n.startswith(HIDDEN)}


def integer(text: str) -> int:
    """Also `8k` (8000), `8K` (8192), `1.5M`."""
    try:
        return human_integer(text)
    except ValueError:
        hint = "write a number, or one with K, M, G or T (of 1024), k, m, g or t (of 1000)"
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number; {hint}") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def json_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None


def json_object(text: str) -> dict[str, Any]:
    value = json_value(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object; write {{...}}")
    return value


def text_list(text: str) -> str | list[str]:
    """One text, or several as a JSON list: `["a", "b"]`."""
    if not text.startswith("["):
        return text
    values = json_value(text)
    if not all(isinstance(value, str) for value in values):
        raise argparse.ArgumentTypeError(f'{text!r} is not a list of texts; write ["...", "..."]')
    return values


def add_flag(group: argparse._ArgumentGroup, name: str, info: FieldInfo, annotation: Any, default: Any) -> None:
    # A flag that was not given is absent from the namespace, so that the config keeps its default.
    common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": _help(info, default)}
    if annotation is bool:
        group.add_argument(flag(name), action=argparse.BooleanOptionalAction, **common)
    elif (item := _item_of(annotation)) is not None:
        how = {"many": "several may be given", "json": "may be given several times, or as a JSON list"}
        common["help"] = f"{info.help}; {how.get(info.several, 'may be given several times')}".replace("%", "%%")
        if info.several == "many":
            common["nargs"] = "+"
        common["type"] = text_list if info.several == "json" else integer if item is int else str
        group.add_argument(flag(name), action=Several, metavar=_metavar(name, item), **common)
    elif info.choices is not None:
        parse = _parser_for(name, annotation)
        canonical = (lambda text: info.aliases.get(text, text)) if info.aliases else parse
        choices, metavar = info.choices, f"{{{','.join(map(str, info.choices))}}}"
        canonical = _available(name, info, canonical)
        if is_optional(annotation):
            choices, canonical = (*choices, None), _or_none(canonical)
        group.add_argument(flag(name), choices=choices, metavar=metavar, type=canonical, **common)
    else:
        if info.several == "optional":
            common |= {"nargs": "?", "const": True}
        metavar, parse = _metavar(name, annotation), _or_word(info.words, _parser_for(name, annotation))
        parse = _or_none(parse) if is_optional(annotation) else parse
        group.add_argument(flag(name), type=parse, metavar=metavar, **common)


def _help(info: FieldInfo, default: Any) -> str:
    shown = {True: "on", False: "off"}[default] if isinstance(default, bool) else default
    text = info.help if default is None else f"{info.help} (default: {shown})"
    return text.replace("%", "%%")


def _item_of(annotation: Any) -> Any:
    """What a tuple of any length holds: of `tuple[int, ...] | None` int. None for other types."""
    tuples = [kind for kind in (annotation, *typing.get_args(annotation)) if typing.get_origin(kind) is tuple]
    return typing.get_args(tuples[0])[0] if tuples else None


def _plain_types(annotation: Any) -> tuple[Any, ...]:
    """The types a value may have: `int | None` gives (int,)."""
    return tuple(t for t in typing.get_args(annotation) if t is not type(None)) or (annotation,)


def _is_object(types: tuple[Any, ...]) -> bool:
    return any(typing.get_origin(kind) is dict for kind in types)


def _parser_for(name: str, annotation: Any) -> Callable[[str], Any]:
    parsers: dict[Any, Callable[[str], Any]] = {int: integer, float: number, str: str}
    types = tuple(kind for kind in _plain_types(annotation) if kind is not bool)  # which has no text
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
