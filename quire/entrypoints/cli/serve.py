"""`quire serve`: the OpenAI-compatible server."""

import argparse
import logging
import os
import socket
from typing import TYPE_CHECKING

from quire.config.flags import FlagParser, add_engine_flags, add_model_argument, engine_kwargs
from quire.config.logs import set_up_logging
from quire.config.server import ServerConfig, add_server_flags, load_api_keys, server_config
from quire.config.vllm.unpack import logging_options

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.core.engine_start import EngineStart

logger = logging.getLogger("quire")

# Unlimited offline; on a server one client's grammars must not make all others wait.
ENGINE_DEFAULTS = {"structured_outputs_max_queue": 64, "structured_outputs_queue_seconds": 30.0}


def parser() -> FlagParser:
    parser = FlagParser(
        prog="quire serve",
        description="Serve a model over OpenAI's HTTP API; without MODEL the embedded SmolLM2. --open-paths "
        "need no API key, everything else does if there is one.",
    )
    add_model_argument(parser)
    add_server_flags(parser)
    add_engine_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Flags are checked before the model is loaded."""
    from quire.config import EngineConfig

    engine_args = ENGINE_DEFAULTS | engine_kwargs(args)
    set_up_logging(*logging_options(engine_args))
    for name in ("reasoning_parser", "reasoning_parser_plugin"):  # vLLM has them in an object, too
        value = (engine_args.get("structured_outputs_config") or {}).pop(name, None)
        if value and not hasattr(args, name):
            setattr(args, name, value)
    config = server_config(args)
    if config.tokens_only:
        engine_args = {"skip_tokenizer_init": True} | engine_args
    api_keys = load_api_keys(config)
    engine_config = EngineConfig.from_kwargs(**engine_args)
    if config.headless:
        return _run_workers(engine_config)
    if engine_config.parallel.node_rank:
        raise ValueError(
            f"node_rank is {engine_config.parallel.node_rank}: the server runs on node 0; add --headless for a machine "
            "with workers only (--node-rank)"
        )
    from quire.core.engine_start import EngineStart
    from quire.entrypoints.http.middleware import import_middleware

    for path in config.middleware:
        import_middleware(path)  # first: what the user's code changes in the environment the engine sees too
    start = EngineStart(engine_config)  # it takes longest
    try:
        return _check_and_serve(config, engine_config, api_keys, start)
    finally:
        start.cancel()


def _check_and_serve(
    config: ServerConfig, engine_config: "EngineConfig", api_keys: tuple[str, ...], start: "EngineStart"
) -> int:
    """The exit code."""
    from quire.engine.async_engine import EngineDeadError
    from quire.entrypoints.http.dialect import dialects
    from quire.entrypoints.http.server import bind

    if config.otlp_traces_endpoint is not None:
        from quire.entrypoints.tracing import check_tracing

        check_tracing()
    for dialect in dialects():
        if dialect.check is not None:
            dialect.check(config)
    for file in (config.ssl_keyfile, config.ssl_certfile, config.ssl_ca_certs):
        if file is not None and not os.path.isfile(file):
            raise ValueError(f"{file} is not a file (--ssl-keyfile, --ssl-certfile, --ssl-ca-certs)")
    if config.grpc_port is not None:
        from quire.entrypoints.grpc.server import check_grpc

        check_grpc(config)
    sock = bind(config)
    try:
        return _serve(config, engine_config, api_keys, sock, start)
    except EngineDeadError as error:
        logger.error("the engine could not start: %s", error)
        return 1
    finally:
        sock.close()
        if config.uds is not None:
            os.unlink(config.uds)


def _run_workers(config: "EngineConfig") -> int:
    """A machine of --nnodes without the engine: the exit code."""
    from quire.engine.resolve_config import resolve_config
    from quire.platforms.start_up import set_torch_environment

    set_torch_environment()
    from quire.executor.headless import HeadlessNode
    from quire.platforms.defaults import with_platform_defaults

    return HeadlessNode(with_platform_defaults(resolve_config(config)[0])).run()


def _serve(
    config: ServerConfig,
    engine_config: "EngineConfig",
    api_keys: tuple[str, ...],
    sock: socket.socket,
    start: "EngineStart",
) -> int:
    """The exit code."""
    if config.api_server_count > 1:
        from quire.entrypoints.http.supervisor import Supervisor

        return Supervisor(config, engine_config, api_keys, sock, start).run()
    from quire.engine.async_llm import AsyncLLM
    from quire.entrypoints.http.app import build_app
    from quire.entrypoints.http.server import Server, announce, base_url

    engine = AsyncLLM(engine_config, start=start)
    server = None
    try:
        app = build_app(engine, config, engine.config, api_keys)
        url, context = base_url(sock, config), app.state.context
        names, kind, task = context.model_names, context.kind, context.task
        server = Server(app, config, ready=lambda: announce(url, names[0], kind, config, task))
        server.run(sockets=[sock])
    finally:
        in_order = server is not None and not server.force_exit
        engine.shutdown(timeout=10.0 if in_order else 0.0)
    if server.failure is not None:
        logger.error("%s; the server has ended", server.failure)
    return 128 + server.signal if server.signal else server.exit_code
