"""`EngineArgs`: an engine's options as one flat dataclass, as vLLM's programs build and parse them."""

import argparse
import dataclasses
import sys
import typing
from dataclasses import make_dataclass
from typing import Any

from quire.config.engine import EngineConfig
from quire.config.fields import options
from quire.config.flags import FlagParser, add_engine_flags
from quire.config.vllm.accepted import SERVER_ARGUMENTS
from quire.config.vllm.table import KINDS, TABLE


def _fields() -> list[tuple[str, Any, Any]]:
    """Every argument of `EngineConfig.from_kwargs`: name, type and default."""
    found = []
    for config in EngineConfig.parts().values():
        hints, defaults = typing.get_type_hints(config), {f.name: f.default for f in dataclasses.fields(config)}
        found += [(name, hints[name], dataclasses.field(default=defaults[name])) for name in options(config)]
    known = {name for name, *_ in found}
    # What works without an option of the engine is an object of several, or the server's.
    ours = [row for row in TABLE.values() if row.status != "works" or row.name in (*KINDS, *SERVER_ARGUMENTS)]
    later = {row.name: next(iter(row.neutral), None) for row in ours if row.name not in known}
    later |= {name: None for name, value in later.items() if value == {}}  # a dataclass has no such defaults
    return [*found, *((name, Any, dataclasses.field(default=value)) for name, value in later.items())]


class _Methods:
    def given(self) -> dict[str, Any]:
        """The arguments that differ from their defaults, ready for `LLM`."""
        of_engine = {name for name, *_ in _fields()}
        fields = [field for field in dataclasses.fields(self) if field.name in of_engine]  # type: ignore[arg-type]
        values = {field.name: getattr(self, field.name) for field in fields}
        return {field.name: values[field.name] for field in fields if values[field.name] is not field.default}

    def create_engine_config(self, usage_context: Any = None, headless: bool = False) -> EngineConfig:
        """Checked. The other arguments are vLLM's and have no meaning here."""
        return EngineConfig.from_kwargs(**self.given())

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Any:
        names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: value for name, value in plain(args).items() if name in names})

    @staticmethod
    def add_cli_args(parser: Any, async_args_only: bool = False) -> Any:
        """A flag for every argument; one that is not given is absent from the parsed arguments."""
        if not async_args_only:
            add_engine_flags(parser)
        return parser


def plain(args: argparse.Namespace) -> dict[str, Any]:
    """Parsed arguments by name; those without an option here are parsed under a prefix."""
    return {name.removeprefix("vllm."): value for name, value in vars(args).items()}


class FlexibleArgumentParser(FlagParser):
    """vLLM's name. `parse_args` accepts what the command line does."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**({"usage": None} | kwargs))

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        if namespace is not None or self._subparsers is not None:
            return super().parse_args(args, namespace)
        return argparse.Namespace(**plain(self.parse(sys.argv[1:] if args is None else args)))


# Made of the config classes, so that an option is written once. Known to type checkers as Any.
EngineArgs: Any = make_dataclass("EngineArgs", _fields(), bases=(_Methods,))
AsyncEngineArgs: Any = make_dataclass(
    "AsyncEngineArgs", [("enable_log_requests", bool, dataclasses.field(default=False))], bases=(EngineArgs,)
)
for _made in (EngineArgs, AsyncEngineArgs):
    _made.__module__ = __name__  # where pickle finds it
