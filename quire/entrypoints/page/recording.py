"""The page without an engine, on a recording of the live view."""

import gzip
import logging
import socket
import threading
import webbrowser
import zlib
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire import __version__
from quire.config.server import ServerConfig
from quire.entrypoints.http.errors import json_response
from quire.entrypoints.http.server import base_url, bind
from quire.entrypoints.page.static_files import static_routes

logger = logging.getLogger("quire")

MAX_TEXT = 512 << 20  # bytes, unpacked


class Recording(msgspec.Struct):
    """As `recording.js` writes it."""

    format: str
    version: int
    samples: list[dict[str, Any]]
    server: dict[str, Any] = {}


def check_recording(data: bytes, name: str) -> Recording:
    try:
        text = data
        if data[:2] == b"\x1f\x8b":
            unpacker = zlib.decompressobj(wbits=31)
            text = unpacker.decompress(data, MAX_TEXT)
            if unpacker.unconsumed_tail:
                raise ValueError(f"{name} is larger than {MAX_TEXT} bytes when unpacked")
        recording = msgspec.json.decode(text, type=Recording)
    except (zlib.error, msgspec.MsgspecError) as error:
        raise ValueError(f"{name} is not a recording of the live view: {error}") from None
    if recording.format != "quire-view" or recording.version != 1 or not recording.samples:
        raise ValueError(f"{name} is not a recording of the live view that this version can play")
    return recording


def recording_app(data: bytes) -> Starlette:
    packed = data if data[:2] == b"\x1f\x8b" else gzip.compress(data)
    server = check_recording(data, "the recording").server

    async def info(request: Request) -> Response:
        shape = {"replay": True, "view": True, "version": __version__, "models": [], "max_model_len": 0}
        models = [str(name) for name in server.get("models", ())][:8]
        return json_response(shape | {"models": models})

    async def recording(request: Request) -> Response:
        headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
        return Response(packed, headers=headers, media_type="application/gzip")

    return Starlette(routes=[*static_routes(), Route("/view/info", info), Route("/view/recording", recording)])


def serve_recording(data: bytes, port: int, open_browser: bool) -> int:
    """Until interrupted, on this machine alone."""
    app, config = recording_app(data), ServerConfig(port=port)
    sock: socket.socket = bind(config)
    url = base_url(sock, config)
    logger.info("open %s/ in a browser; Ctrl-C ends it", url)
    if open_browser:
        threading.Thread(target=webbrowser.open, args=(url + "/",), daemon=True).start()
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, log_level="warning", access_log=False, lifespan="off"))
    with sock:
        server.run(sockets=[sock])
    return 0
