"""`quire serve`: the OpenAI-compatible server."""

import argparse
import os

from quire.config.flags import FlagParser, add_engine_flags, add_model_argument, engine_kwargs
from quire.config.server import add_server_flags, load_api_keys, server_config


def parser() -> FlagParser:
    parser = FlagParser(
        prog="quire serve",
        description="Serve a model over OpenAI's HTTP API; without MODEL the embedded SmolLM2. /health, /ready and "
        "/ping need no API key, everything else does if there is one.",
    )
    add_model_argument(parser)
    add_server_flags(parser)
    add_engine_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """What can be wrong with the flags is said before the model is loaded."""
    from quire.config import EngineConfig
    from quire.entrypoints.logs import set_up_logging

    config = server_config(args)
    api_keys = load_api_keys(config, os.environ)
    engine_config = EngineConfig.from_kwargs(**engine_kwargs(args))
    set_up_logging()
    from quire.entrypoints.openai.middleware import import_middleware
    from quire.entrypoints.openai.server import Server, announce, base_url, bind

    for place in config.middleware:
        import_middleware(place)
    for file in (config.ssl_keyfile, config.ssl_certfile):
        if file is not None and not os.path.isfile(file):
            raise ValueError(f"{file} is not a file (--ssl-keyfile, --ssl-certfile)")
    sock = bind(config)
    try:
        from quire.engine.async_llm import AsyncLLM
        from quire.entrypoints.openai.app import build_app

        engine = AsyncLLM(engine_config)
        try:
            app = build_app(engine, config, engine.config, api_keys)
            url = base_url(sock, config)
            server = Server(app, config, ready=lambda: announce(url, app.state.context))
            server.run(sockets=[sock])
        finally:
            engine.shutdown()
    finally:
        sock.close()
    return server.exit_code
