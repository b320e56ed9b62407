"""What parsers of a checkpoint's quantization_config share: its complaints, and values that are checked."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from quire.config.values import whole_number

PER_CHANNEL = -1  # a group size: one group of all inputs


def unsupported(what: str, allowed: str) -> ValueError:
    return ValueError(f"the checkpoint's quantization_config has {what}, which is not supported; supported: {allowed}")


@contextmanager
def well_formed() -> Iterator[None]:
    """Inside, a value of a wrong type, a missing one or a bad pattern is a ValueError about the config."""
    try:
        yield
    except (TypeError, AttributeError, LookupError, re.error) as error:
        raise ValueError(f"the checkpoint's quantization_config is malformed: {error}") from error


def supported_bits(bits: Any, allowed: tuple[int, ...], of: str = "weights") -> int:
    if type(bits) is not int or bits not in allowed:
        raise unsupported(f"{of} of {bits!r} bits", " or ".join(map(str, allowed)))
    return bits


def supported_group_size(group_size: Any) -> int:
    """A whole number, or PER_CHANNEL."""
    if type(group_size) is int and group_size == PER_CHANNEL:
        return PER_CHANNEL
    return whole_number("group_size (quantization_config)", group_size)


def names_in(stored: dict[str, Any], key: str) -> tuple[str, ...]:
    """A list of names, or of lists of these; none if it is missing."""
    listed = stored.get(key) or []
    names = [name for item in listed for name in (item if isinstance(item, list) else [item])]
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{key} must be a list of names")
    return tuple(names)
