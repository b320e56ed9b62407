"""`quire complete`: continue prompts with a model that a server runs."""

import argparse
from typing import Any

from quire.config.flags import FlagParser
from quire.entrypoints.cli.api_client import ApiClient, ServerError, add_client_flags, client_from
from quire.entrypoints.cli.chat_model import to_send
from quire.entrypoints.cli.sampling_flags import add_sampling_flags, given_settings
from quire.entrypoints.cli.terminal import Terminal


def parser() -> FlagParser:
    parser = FlagParser(
        prog="quire complete",
        usage="%(prog)s [PROMPT] [flags]",
        description="Continue a prompt with a running OpenAI-compatible server. Without PROMPT each line of standard "
        "input is one. Sampling flags that are not given default to the server's.",
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to continue")
    parser.add_argument("-q", "--quick", metavar="PROMPT", help="the same as PROMPT")
    add_client_flags(parser)
    add_sampling_flags(parser, show_defaults=False)
    return parser


def run(args: argparse.Namespace) -> int:
    if args.prompt is not None and args.quick is not None:
        raise ValueError("both PROMPT and --quick are given; give one of them")
    settings = given_settings(args)
    if settings.get("n", 1) != 1:
        raise ValueError("n is always 1 here; quire run-batch writes several completions of a prompt")
    client = client_from(args)
    completer = Completer(client, args.model_name or client.first_model(), settings, Terminal())
    prompt = args.prompt if args.prompt is not None else args.quick
    return completer.run_lines() if prompt is None else completer.run_one(prompt)


class Completer:
    def __init__(self, client: ApiClient, model: str, settings: dict[str, Any], terminal: Terminal) -> None:
        self.client = client
        self.terminal = terminal
        self.fields = {"model": model, **to_send(settings)}

    def run_one(self, prompt: str) -> int:
        self.terminal.interactive = False
        return 0 if self.complete(prompt) else 130

    def run_lines(self) -> int:
        """Until the end of input, or Ctrl-C at a prompt."""
        self.terminal.note(f"{self.fields['model']} at {self.client.url}; Ctrl-C stops an answer, Ctrl-D ends")
        failed = False
        first = True
        while True:
            try:
                prompt = self.terminal.read_message()
            except (EOFError, KeyboardInterrupt) as end:
                self.terminal.note("")
                return 130 if isinstance(end, KeyboardInterrupt) else int(failed)
            if not prompt.strip():
                continue
            if not first and not self.terminal.interactive:
                self.terminal.write("\n")  # separates completions
            first = False
            try:
                if not self.complete(prompt) and not self.terminal.interactive:
                    return 130
            except ServerError as error:
                if error.fatal:
                    raise
                failed = not self.terminal.interactive
                self.terminal.error(str(error))

    def complete(self, prompt: str) -> bool:
        """False if Ctrl-C ended it; closing the connection ends it in the server too."""
        try:
            with self.client.stream("/completions", {**self.fields, "prompt": prompt}) as events:
                for event in events:
                    for choice in event["choices"][:1]:
                        self.terminal.write_answer(choice.get("text") or "")
        except KeyboardInterrupt:
            self.terminal.write("\n")
            self.terminal.note("interrupted")
            return False
        self.terminal.write("\n")
        return True
