"""`quire view`: play a recording of a server's live view in the browser."""

import argparse
import logging
from pathlib import Path

from quire.config.flags import FlagParser
from quire.config.logs import set_up_logging

MAX_BYTES = 64 << 20


def parser() -> FlagParser:
    parser = FlagParser(
        prog="quire view", description="Play a recording of the live view, as its page saves it, in a browser."
    )
    parser.add_argument("file", metavar="FILE", help="the recording, such as quire-view-….json.gz")
    parser.add_argument("--port", type=int, default=0, help="port to listen on, of this machine alone; 0: a free one")
    parser.add_argument("--open", action="store_true", help="open it in a browser")
    return parser


def run(args: argparse.Namespace) -> int:
    from quire.entrypoints.page.recording import check_recording, serve_recording

    set_up_logging(logging.INFO)
    file = Path(args.file)
    if file.stat().st_size > MAX_BYTES:
        raise ValueError(f"{file} has {file.stat().st_size} bytes; recordings have at most {MAX_BYTES}")
    data = file.read_bytes()
    check_recording(data, str(file))
    return serve_recording(data, args.port, args.open)
