"""API dialects: families of endpoints with their own request, response and error schemas, such as OpenAI's."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.routing import Route

from quire.entrypoints.http.context import ServerContext
from quire.entrypoints.http.errors import ApiError, openai_body


@dataclass(frozen=True)
class Dialect:
    """`error_body` encodes an error on one of the dialect's paths, if the response has not started."""

    name: str
    routes: Callable[[ServerContext], Sequence[Route]]
    error_body: Callable[[ApiError], bytes] = openai_body


BUILT_IN = ("quire.entrypoints.openai.routes:OPENAI",)  # imported only by servers

_registered: dict[str, Dialect] = {}


def register_dialect(dialect: Dialect) -> None:
    """For plugins: serve the dialect's routes beside the others. A later registration replaces one of the same name."""
    _registered[dialect.name] = dialect


def dialects() -> list[Dialect]:
    found: dict[str, Dialect] = {}
    for path in BUILT_IN:
        module, _, name = path.partition(":")
        dialect = getattr(importlib.import_module(module), name)
        found[dialect.name] = dialect
    return list((found | _registered).values())
