"""`quire chat`: talk with a model."""

import argparse
from typing import TYPE_CHECKING, Any

from quire.config.flags import FlagParser, add_engine_flags, add_model_argument
from quire.entrypoints.cli import start
from quire.entrypoints.cli.api_client import add_client_flags, client_from
from quire.entrypoints.cli.sampling_flags import add_sampling_flags, given_settings
from quire.messages.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.entrypoints.cli.chat_model import ChatModel

RESERVED_FLAGS = ("seed",)  # means the sampling seed, as in `quire generate`
# Longer and less random than SamplingParams's defaults.
DEFAULTS: dict[str, Any] = {"temperature": 0.7, "max_tokens": 1024}


def parser() -> FlagParser:
    parser = FlagParser(
        prog="quire chat",
        description="Talk with a model; /help lists the commands. If standard input is not a terminal, each line is "
        "a message and only the answers are printed. With --url a server generates, with its own defaults for sampling "
        "parameters that are not given.",
    )
    add_model_argument(parser)
    group = parser.add_argument_group("Conversation")
    group.add_argument("--system-prompt", metavar="TEXT", help="how the model should behave")
    group.add_argument("-q", "--quick", metavar="MESSAGE", help="send one message, print the answer and end")
    add_client_flags(parser, default_url=None)
    add_sampling_flags(parser, **DEFAULTS)
    add_engine_flags(parser, leave_out=RESERVED_FLAGS)
    return parser


def run(args: argparse.Namespace) -> int:
    settings = given_settings(args)
    if settings.get("n", 1) != 1:
        raise ValueError("n is always 1 in a chat")
    return _with_server(args, settings) if args.url is not None else _with_engine(args, settings)


def _with_engine(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    for name in ("model_name", "api_key"):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} is for a server; give its address with --url")
    SamplingParams(**DEFAULTS | settings)  # invalid combinations fail before the model is loaded
    engine = start.start_engine(args, leave_out=RESERVED_FLAGS)
    try:
        from quire.entrypoints.cli.chat_model import LocalModel

        renderer = start.chat_renderer(engine)
        renderer.render([{"role": "user", "content": "Hello"}])  # a missing or broken template fails now
        return _talk(LocalModel(engine, renderer), args, DEFAULTS | engine.config.model.default_sampling | settings)
    finally:
        engine.shutdown()


def _with_server(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    from quire.entrypoints.cli.chat_model import RemoteModel

    start.refuse_engine_flags(args, allowed=(*RESERVED_FLAGS, "model"))
    client = client_from(args)
    name = args.model_name or getattr(args, "model", None) or client.first_model()
    return _talk(RemoteModel(client, name), args, settings)


def _talk(model: "ChatModel", args: argparse.Namespace, settings: dict[str, Any]) -> int:
    from quire.entrypoints.cli.chat_session import ChatSession
    from quire.entrypoints.cli.terminal import Terminal

    terminal = Terminal()
    session = ChatSession(model, terminal, settings, args.system_prompt)
    if args.quick is not None:
        terminal.interactive = False
        session.answer(args.quick)
        return 0
    terminal.note("/help lists the commands, Ctrl-D ends")
    session.run()
    return 1 if session.failed and not terminal.interactive else 0
