"""The page's own files: read once, compressed once, revalidated by their hash."""

import gzip
import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
}
# Only what this server sends runs, and nothing inline. A text reaches the parser of HTML through the sanitizer alone.
SECURITY = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


@dataclass(frozen=True)
class StaticFile:
    path: str  # at which it is served
    file: Path

    @cached_property
    def content(self) -> bytes:
        return self.file.read_bytes()

    @cached_property
    def compressed(self) -> bytes:
        return gzip.compress(self.content, mtime=0)

    @cached_property
    def etag(self) -> str:
        return f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'

    async def respond(self, request: Request) -> Response:
        headers = {**SECURITY, "etag": self.etag, "cache-control": "no-cache", "vary": "accept-encoding"}
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if self.etag in known:
            return Response(status_code=304, headers=headers)
        headers["content-type"] = TYPES[self.file.suffix]
        if self.file.suffix != ".woff2" and "gzip" in request.headers.get("accept-encoding", ""):
            return Response(self.compressed, headers=headers | {"content-encoding": "gzip"})
        return Response(self.content, headers=headers)


def static_files() -> list[StaticFile]:
    """index.html at /, all others below /page/."""
    files = sorted(file for file in FOLDER.rglob("*") if file.suffix in TYPES)
    below = [StaticFile(f"/page/{file.relative_to(FOLDER).as_posix()}", file) for file in files]
    return [StaticFile("/", FOLDER / "index.html"), *(each for each in below if each.file.name != "index.html")]


def static_routes() -> list[Route]:
    return [Route(file.path, file.respond, methods=["GET"], include_in_schema=False) for file in static_files()]
