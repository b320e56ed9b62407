"""One of several processes that take a server's requests, for the engine that they share."""

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
from quire.core.engine_process import die_with_parent, leave_signals_to_parent
from quire.engine.async_engine import EngineDeadError
from quire.engine.async_llm import AsyncLLM
from quire.engine.engine_connection import EngineWire
from quire.entrypoints.http.app import build_app
from quire.entrypoints.http.peers import Fleet
from quire.entrypoints.http.process_messages import Failed, Started, frame
from quire.entrypoints.http.server import Server


@dataclass(frozen=True)
class ApiProcess:
    """What a process is told at its start."""

    index: int
    config: ServerConfig
    engine_config: EngineConfig
    api_keys: tuple[str, ...]
    engine_folder: Path
    listener: socket.socket  # bound; all processes accept from it
    channel: socket.socket  # to the supervisor
    board: MutableSequence[int]
    log_level: int


def api_process_main(own: ApiProcess) -> None:
    die_with_parent()
    leave_signals_to_parent()
    set_up_logging(own.log_level)
    try:
        code = _serve(own)
    except EngineDeadError:
        code = 1  # the supervisor knows more of that
    except (ValueError, OSError) as error:
        own.channel.sendall(frame(Failed(str(error))))
        code = 2
    logging.shutdown()
    os._exit(code)  # nothing is left to wait for, least of all a thread of a library


def _serve(own: ApiProcess) -> int:
    engine = AsyncLLM(own.engine_config, EngineWire(own.engine_folder, own.index))
    try:
        fleet = Fleet(own.channel, own.board, own.index)
        app = build_app(engine, own.config, engine.config, own.api_keys, fleet)
        tasks: set[asyncio.Task[None]] = set()

        async def talk() -> None:
            channel = await fleet.open()
            channel.send(Started(server.context.model_names[0]))
            await fleet.serve(server, engine)

        server = Server(app, own.config, lambda: tasks.add(asyncio.create_task(talk())), supervised=True)
        server.run(sockets=[own.listener])
    finally:
        engine.shutdown()
    return server.exit_code
