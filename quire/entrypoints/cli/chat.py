"""`quire chat`: talk with a model."""

import argparse

from quire.config.flags import FlagParser, add_engine_flags, add_model_argument
from quire.entrypoints.cli import start
from quire.entrypoints.cli.sampling_flags import add_sampling_flags, sampling_params

TAKEN = ("seed",)  # the sampling seed, as in `quire generate`
# A conversation wants longer and less random answers than SamplingParams's defaults give.
DEFAULTS = {"temperature": 0.7, "max_tokens": 1024}


def parser() -> FlagParser:
    parser = FlagParser(
        prog="quire chat",
        description="Talk with a model; /help lists the commands. If standard input is no terminal, each line is a "
        "message and only the answers are printed.",
    )
    add_model_argument(parser)
    group = parser.add_argument_group("Conversation")
    group.add_argument("--system-prompt", metavar="TEXT", help="how the model should behave")
    add_sampling_flags(parser, **DEFAULTS)
    add_engine_flags(parser, leave_out=TAKEN)
    return parser


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args, **DEFAULTS)
    if params.n != 1:
        raise ValueError("n is always 1 in a chat")
    from quire.entrypoints.cli.chat_session import ChatSession
    from quire.entrypoints.cli.terminal import Terminal

    engine = start.start_engine(args, leave_out=TAKEN)
    try:
        renderer = start.chat_renderer(engine)
        renderer.render([{"role": "user", "content": "Hello"}])  # no template, or a broken one: said now
        terminal = Terminal()
        terminal.note("/help lists the commands, Ctrl-D ends")
        session = ChatSession(engine, renderer, terminal, params, args.system_prompt)
        session.run()
    finally:
        engine.shutdown()
    return 1 if session.failed and not terminal.interactive else 0
