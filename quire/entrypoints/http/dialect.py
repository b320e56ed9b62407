"""API dialects: families of endpoints with their own request, response and error schemas, such as OpenAI's."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.routing import Route

from quire.config.server import ServerConfig
from quire.entrypoints.http.context import ServerContext
from quire.entrypoints.http.errors import ApiError
from quire.plugins import load_plugins


@dataclass(frozen=True)
class Dialect:
    """`error_body` encodes an error on one of the dialect's paths, if the response has not started. Its paths are all
    those under its `prefixes`, whether they have a route or not; of several prefixes the longest counts."""

    name: str
    routes: Callable[[ServerContext], Sequence[Route]]
    error_body: Callable[[ApiError], bytes]
    prefixes: tuple[str, ...]  # such as /v1/messages; / is every path that is no other dialect's
    open_paths: tuple[str, ...] = ()  # of its routes, those that need no key: nothing there is anybody's
    check: Callable[[ServerConfig], None] | None = None  # ValueError for wrong flags, before the model is loaded
    example: Callable[[str, str], str] | None = None  # a command to try, from the server's URL and the model's name
    pooling_example: Callable[[str, str, str], str] | None = None  # of a model that pools, with its task
    error_formats: Mapping[str, Callable[[ApiError], bytes]] = field(default_factory=dict)  # by --error-format
    # For /openapi.json: what POST requests have as their body, by path, and the JSON schema of errors if not OpenAI's
    bodies: Mapping[str, type[msgspec.Struct]] = field(default_factory=dict)
    error_schema: Mapping[str, Any] | None = None


BUILT_IN = (  # imported only by servers
    "quire.entrypoints.openai.routes:OPENAI",
    "quire.entrypoints.responses.routes:RESPONSES",
    "quire.entrypoints.anthropic.routes:ANTHROPIC",
    "quire.entrypoints.pooling.routes:POOLING",
    "quire.entrypoints.page.routes:PAGE",
)

_registered: dict[str, Dialect] = {}


def register_dialect(dialect: Dialect) -> None:
    """For plugins: serve the dialect's routes beside the others. A later registration replaces one of the same name."""
    _registered[dialect.name] = dialect


def dialects() -> list[Dialect]:
    """The built-in ones first, then those of plugins."""
    load_plugins()
    found: dict[str, Dialect] = {}
    for path in BUILT_IN:
        module, _, name = path.partition(":")
        dialect = getattr(importlib.import_module(module), name)
        found[dialect.name] = dialect
    return list((found | _registered).values())


def dialect_of(dialects: Sequence[Dialect], path: str) -> Dialect:
    """Of several prefixes the longest counts."""
    below = path + "/"

    def longest(dialect: Dialect) -> int:
        prefixes = (prefix.rstrip("/") + "/" for prefix in dialect.prefixes)
        return max((len(prefix) for prefix in prefixes if below.startswith(prefix)), default=-1)

    return max(dialects, key=longest)


class ErrorBodies:
    """Encodes errors in the schema of the dialect whose path it is; in the first one's if it is no dialect's."""

    def __init__(self, dialects: Sequence[Dialect], format: str = "openai") -> None:
        self._dialects = dialects
        self._format = format

    def encode(self, path: str, error: ApiError) -> bytes:
        dialect = dialect_of(self._dialects, path)
        return dialect.error_formats.get(self._format, dialect.error_body)(error)
