"""Dialects: families of endpoints with request, response and error shapes of their own, as OpenAI's are."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.routing import Route

from quire.entrypoints.http.context import ServerContext
from quire.entrypoints.http.errors import ApiError, openai_body


@dataclass(frozen=True)
class Dialect:
    """`error_body` shapes what is refused or fails on one of its paths, before an answer has begun."""

    name: str
    routes: Callable[[ServerContext], Sequence[Route]]
    error_body: Callable[[ApiError], bytes] = openai_body


BUILT_IN = ("quire.entrypoints.openai.routes:OPENAI",)  # imported with the server alone

_registered: dict[str, Dialect] = {}


def register_dialect(dialect: Dialect) -> None:
    """For plugins: the dialect's routes are served beside the others. Of two with one name the later counts."""
    _registered[dialect.name] = dialect


def dialects() -> list[Dialect]:
    found: dict[str, Dialect] = {}
    for place in BUILT_IN:
        module, _, name = place.partition(":")
        dialect = getattr(importlib.import_module(module), name)
        found[dialect.name] = dialect
    return list((found | _registered).values())
