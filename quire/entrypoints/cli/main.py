"""The `quire` command: finds the subcommand and imports only that one, so that `quire --help` is fast."""

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from quire import __version__


@dataclass(frozen=True)
class Command:
    """A module with `parser() -> FlagParser` and `run(args) -> int` (the exit code)."""

    module: str
    summary: str


COMMANDS = {
    "serve": Command("quire.entrypoints.cli.serve", "serve OpenAI's HTTP API"),
    "generate": Command("quire.entrypoints.cli.generate", "continue prompts from flags, a file or standard input"),
    "chat": Command("quire.entrypoints.cli.chat", "talk with a model in the terminal, here or on a server"),
    "complete": Command("quire.entrypoints.cli.complete", "continue prompts with a running server"),
    "run-batch": Command("quire.entrypoints.cli.run_batch", "run a file of requests in OpenAI's batch format"),
    "models": Command("quire.entrypoints.cli.models", "which models are served, and how a given one would be"),
    "view": Command("quire.entrypoints.cli.view", "play a recording of a server's live view in the browser"),
    "plan": Command("quire.entrypoints.cli.plan", "memory, flags and speed of a model on given GPUs, predicted"),
    "collect-env": Command("quire.entrypoints.cli.collect_env", "facts about this machine for a bug report"),
    "bench throughput": Command("quire.bench.throughput", "output tokens per second of many requests at once"),
    "bench latency": Command("quire.bench.latency", "time to first token and decode rate of one request"),
    "bench startup": Command("quire.bench.startup", "time from process start to first token, by phase"),
    "bench serve": Command("quire.bench.serve", "a server under load: throughput, latencies, goodput"),
    "bench structured": Command("quire.bench.structured", "requests under a JSON schema against unconstrained ones"),
    # Benchmarks for Quire's own development
    "bench http": Command(
        "quire.bench.internal.http_offline", "HTTP streaming against offline, same requests, in one run"
    ),
    "bench soak": Command(
        "quire.bench.internal.soak.command", "minutes of mixed traffic; memory and blocks must be released"
    ),
    "bench frontend": Command("quire.bench.internal.frontend", "tokens per second that one API process can stream"),
    "bench card": Command(
        "quire.bench.internal.card.command", "all workloads of the reference numbers, beside vLLM's figures"
    ),
    "bench core": Command("quire.bench.internal.core_step", "host time of a decode step, without the model"),
}


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    for length in (2, 1):
        command = COMMANDS.get(" ".join(words[:length]))
        if command is not None:
            return _run(command, words[length:])
    return _without_command(words)


def _run(command: Command, argv: list[str]) -> int:
    module = importlib.import_module(command.module)
    parser = module.parser()
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    args = parser.parse(argv)
    try:
        return module.run(args)
    except BrokenPipeError:
        # The reader (`| head`) has closed the pipe. Python would raise again when it flushes standard output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as error:
        if args.debug:
            raise
        print(f"quire: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _without_command(words: list[str]) -> int:
    """`quire`, `quire --help`, `quire --version`, `quire bench [--help]`, or a mistake."""
    if words == ["--version"]:
        print(f"quire {__version__}")
        return 0
    asks_help = bool({"-h", "--help"} & set(words))
    named = [word for word in words if word not in ("-h", "--help")]
    if not named or named == ["bench"]:
        print(_help(" ".join(named)))
        return 0 if asks_help else 2
    given = " ".join(named[:2]) if named[0] == "bench" else named[0]
    near = difflib.get_close_matches(given, [*COMMANDS, "bench", "--version", "--help"], n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(COMMANDS)}"
    print(f"quire: error: unknown command {given!r}; {hint}\nsee quire --help", file=sys.stderr)
    return 2


def _help(prefix: str) -> str:
    shown = {name: command.summary for name, command in COMMANDS.items() if name.startswith(prefix)}
    return "\n".join(
        [
            f"usage: quire {prefix or 'COMMAND'} ...".replace("bench ...", "bench COMMAND ..."),
            "",
            *(f"  {name:<18}{summary}" for name, summary in shown.items()),
            "",
            "  quire COMMAND --help lists the flags of a command; quire --version prints the version.",
        ]
    )
