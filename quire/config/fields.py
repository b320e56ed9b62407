"""Config fields with help, choices and range, from which flags and validation are derived."""

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.config.vllm.choices import to_come


@dataclass(frozen=True)
class FieldInfo:
    help: str
    choices: tuple[Any, ...] | None = None
    minimum: float | None = None
    maximum: float | None = None
    words: tuple[str, ...] = ()  # accepted in place of a number
    several: str = "repeat"  # how a tuple is given: one value per flag, "many" values, or one or a "json" list;
    # "optional": a flag without a value is True
    aliases: Mapping[str, Any] = field(default_factory=dict)  # other spellings of choices
    internal: bool = False  # filled in by Quire, no flag


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[Any, ...] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    words: tuple[str, ...] = (),
    several: str = "repeat",
    aliases: Mapping[str, Any] | None = None,
) -> Any:
    """A dataclass field that is also a command-line flag."""
    info = FieldInfo(help, choices, minimum, maximum, words, several, aliases or {})
    return dataclasses.field(default=default, metadata={"info": info})


def internal(default: Any = None) -> Any:
    """A field that Quire fills in while it resolves the model; users cannot set it."""
    info = FieldInfo("", internal=True)
    if isinstance(default, (dict, list)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata={"info": info})
    return dataclasses.field(default=default, metadata={"info": info})


def options(config: type) -> dict[str, FieldInfo]:
    """The user-settable fields of a config class, in order."""
    infos = {f.name: f.metadata["info"] for f in dataclasses.fields(config) if "info" in f.metadata}
    return {name: info for name, info in infos.items() if not info.internal}


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def is_optional(annotation: Any) -> bool:
    return type(None) in typing.get_args(annotation)


def validate(config: Any) -> None:
    """Raise a ValueError that names the field, what was given and what is allowed."""
    hints = typing.get_type_hints(type(config))
    for name, info in options(type(config)).items():
        value = getattr(config, name)
        if value is None and is_optional(hints[name]):
            continue
        if str(value) in info.aliases:
            value = info.aliases[str(value)]
            setattr(config, name, value)
        if info.choices is not None and value not in info.choices:
            raise ValueError(f"{refused_choice(name, value, info)} ({flag(name)})")
        if info.minimum is None and info.maximum is None:
            continue
        if value in info.words:
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        low = info.minimum if info.minimum is not None else float("-inf")
        high = info.maximum if info.maximum is not None else float("inf")
        if not number or not low <= value <= high:
            bounds = f"at least {low:g}" if info.maximum is None else f"between {low:g} and {high:g}"
            raise ValueError(f"{name} is {value!r}; it must be {bounds} ({flag(name)})")


def refused_choice(name: str, value: Any, info: FieldInfo) -> str:
    allowed = ", ".join(str(c) for c in info.choices or ())
    return f"{to_come(name, value)}{name} is {value!r}; allowed: {allowed}"


def require_object(name: str, value: Any) -> None:
    """Check an option that is a JSON object on the command line: a dict or None in Python."""
    if value is not None and not (isinstance(value, dict) and all(isinstance(key, str) for key in value)):
        raise ValueError(
            f"{name} is {value!r}; it must be a dict with strings as keys ({flag(name)} accepts a JSON object)"
        )
