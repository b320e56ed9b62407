"""One of several API processes that accept requests for one shared engine."""

import asyncio
import logging
import os
import socket
from collections.abc import MutableSequence
from dataclasses import dataclass
from pathlib import Path

from quire.config import EngineConfig
from quire.config.logs import set_up_logging
from quire.config.server import ServerConfig
from quire.engine.async_engine import EngineDeadError
from quire.engine.async_llm import AsyncLLM
from quire.engine.engine_connection import EngineChannel
from quire.entrypoints.http.app import build_app
from quire.entrypoints.http.peers import RemotePeers
from quire.entrypoints.http.process_messages import Failed, Started, frame
from quire.entrypoints.http.server import Server
from quire.platforms.process import die_with_parent, leave_signals_to_parent


@dataclass(frozen=True)
class ApiProcess:
    """Start arguments of an API process."""

    index: int
    config: ServerConfig
    engine_config: EngineConfig
    api_keys: tuple[str, ...]
    engine_folder: Path
    listener: socket.socket  # bound; all processes accept from it
    channel: socket.socket  # to the supervisor
    load_board: MutableSequence[int]
    log_level: int


def api_process_main(args: ApiProcess) -> None:
    die_with_parent()
    leave_signals_to_parent()
    set_up_logging(args.log_level, args.engine_config.observability.log_config_file)
    try:
        code = _serve(args)
    except EngineDeadError:
        code = 1  # the supervisor logs the cause
    except (ValueError, OSError) as error:
        args.channel.sendall(frame(Failed(str(error))))
        code = 2
    logging.shutdown()
    os._exit(code)  # without waiting for threads of libraries


def _serve(args: ApiProcess) -> int:
    engine = AsyncLLM(args.engine_config, EngineChannel(args.engine_folder, args.index))
    try:
        peers = RemotePeers(args.channel, args.load_board, args.index)
        app = build_app(engine, args.config, engine.config, args.api_keys, peers)
        tasks: set[asyncio.Task[None]] = set()

        async def connect() -> None:
            channel = await peers.open()
            channel.send(Started(server.context.model_names[0], server.context.kind, server.context.task))
            await peers.serve(server, engine)

        server = Server(app, args.config, lambda: tasks.add(asyncio.create_task(connect())), supervised=True)
        server.run(sockets=[args.listener])
    finally:
        engine.shutdown()
    return server.exit_code
