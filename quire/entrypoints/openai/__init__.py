"""The OpenAI-compatible HTTP server: `build_app` makes it, `server.serve` runs it."""

from quire.entrypoints.openai.app import build_app

__all__ = ["build_app"]
