"""The OpenAI-compatible HTTP server: `build_app` makes it, `server.serve` runs it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.entrypoints.openai.app import build_app

__all__ = ["build_app"]


def __getattr__(name: str) -> Any:
    # Parsers of generated text are imported from here by packages that the server itself imports.
    if name == "build_app":
        from quire.entrypoints.openai.app import build_app

        return build_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
