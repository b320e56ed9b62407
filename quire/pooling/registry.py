"""Pooling methods by name. Importing this needs no torch: the front end checks names, the worker makes methods."""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.config.shown import shown

if TYPE_CHECKING:
    from quire.pooling.methods import PoolingMethod

DEFAULT_POOLING_TYPE = "LAST"


@dataclass(frozen=True)
class PoolingType:
    path: str  # module:Class of a PoolingMethod
    whole_prompt: bool  # needs hidden states that a prefix found in the cache would lack
    tokens: bool = False  # a vector for each token


_TYPES = {
    "LAST": PoolingType("quire.pooling.methods:LastToken", whole_prompt=False),
    "MEAN": PoolingType("quire.pooling.methods:Mean", whole_prompt=True),
    "CLS": PoolingType("quire.pooling.methods:FirstToken", whole_prompt=True),
    "ALL": PoolingType("quire.pooling.methods:AllTokens", whole_prompt=True, tokens=True),
    "STEP": PoolingType("quire.pooling.methods:AllTokens", whole_prompt=True, tokens=True),
}


def register_pooling_type(name: str, path: str, whole_prompt: bool) -> None:
    """Let `pooling_type` name the class `path`, as module:Class; for plugins."""
    _TYPES[name.upper()] = PoolingType(path, whole_prompt)


def find_pooling_type(name: str) -> PoolingType:
    found = _TYPES.get(name.upper())
    if found is None:
        raise ValueError(f"pooling_type is {shown(name)}; it must be one of: {', '.join(_TYPES)}")
    return found


def make_pooling_method(name: str) -> "PoolingMethod":
    module, _, attribute = find_pooling_type(name).path.partition(":")
    method: PoolingMethod = getattr(importlib.import_module(module), attribute)()
    return method
