"""A conversation with a model: its history, its settings, and the slash commands that change them."""

import difflib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from quire.entrypoints.cli.chat_model import ChatModel, ChatResponse
from quire.entrypoints.cli.sampling_flags import fields, with_value
from quire.entrypoints.cli.terminal import Terminal
from quire.messages.sampling_params import SamplingParams


class ChatSession:
    """`settings` are the sampling parameters given by the command or its user; /set changes them."""

    def __init__(
        self, model: ChatModel, terminal: Terminal, settings: dict[str, Any], system: str | None = None
    ) -> None:
        self.model = model
        self.terminal = terminal
        self.settings = settings
        self.system = system
        self.history: list[dict[str, str]] = []
        self.failed = False
        self._commands: dict[str, Callable[[str], bool | None]] = {
            "help": self._help,
            "system": self._system,
            "set": self._set,
            "show": self._show,
            "clear": self._clear,
            "undo": self._undo,
            "save": self._save,
            "quit": self._quit,
            "exit": self._quit,
        }

    def run(self) -> None:
        """Until /quit or the end of input."""
        while True:
            try:
                message = self.terminal.read_message()
            except EOFError:
                if self.terminal.interactive:
                    self.terminal.write("\n")
                return
            except KeyboardInterrupt:
                self.terminal.write("\n")
                self.terminal.note("Ctrl-D or /quit ends")
                continue
            if message.strip() and not self.handle(message):
                return

    def handle(self, message: str) -> bool:
        """Run a command or answer a message; false at /quit. An error is printed and changes nothing."""
        try:
            if message.startswith("/"):
                return self._run_command(message)
            self.answer(message)
        except (ValueError, OSError) as error:
            self.failed = True
            self.terminal.error(str(error))
        return True

    def answer(self, text: str) -> None:
        question: dict[str, str] = {"role": "user", "content": text}
        began = time.perf_counter()
        started = False

        def write(part: str) -> None:
            nonlocal started
            started = True
            self.terminal.write_answer(part)

        try:
            answer = self.model.answer([*self._messages(), question], self.settings, write)
        except ValueError:
            if started:
                self.terminal.write("\n")
            raise
        self.terminal.write("\n")
        self.history += [question, {"role": "assistant", "content": answer.text}]
        self.terminal.note(_summary(answer, time.perf_counter() - began))

    def _messages(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.history]

    def _run_command(self, line: str) -> bool:
        name, _, rest = line[1:].partition(" ")
        command = self._commands.get(name)
        if command is None:
            near = difflib.get_close_matches(name, self._commands, n=1)
            raise ValueError(f"unknown command /{name}; " + (f"did you mean /{near[0]}?" if near else "see /help"))
        return command(rest.strip()) is not False

    def _help(self, _: str) -> None:
        lines = [
            "/system TEXT      set the system prompt (without TEXT: the template's own)",
            "/set NAME VALUE   set a sampling parameter, e.g. /set temperature 0",
            "/show             show the settings",
            "/clear            forget the conversation",
            "/undo             forget the last message and its answer",
            "/save FILE        write the conversation as JSON",
            "/quit             end (also Ctrl-D)",
            'A line that ends in \\ continues on the next; """ begins and ends a message of several lines.',
            "Ctrl-C stops an answer.",
        ]
        self.terminal.write("\n".join(lines) + "\n")

    def _system(self, text: str) -> None:
        self.system = text or None
        self.terminal.note("system prompt set" if text else "system prompt removed")

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if not name or not value.strip():
            raise ValueError(f"/set NAME VALUE; names: {', '.join(fields())}")
        field = name.replace("-", "_")
        changed = with_value(SamplingParams(**{"max_tokens": None, **self.settings}), field, value.strip())
        if changed.n != 1:
            raise ValueError("n is always 1 in a chat")
        self.settings[field] = getattr(changed, field)
        self.terminal.note(f"{name} is {self.settings[field]!r}")

    def _show(self, _: str) -> None:
        shown = {"model": self.model.name, "system": self.system, "messages": len(self.history)}
        for name in fields():
            if name in self.settings:
                shown[name] = msgspec.to_builtins(self.settings[name])
        self.terminal.write("".join(f"{name}: {value}\n" for name, value in shown.items()))

    def _clear(self, _: str) -> None:
        self.history.clear()
        self.terminal.note("the conversation is empty")

    def _undo(self, _: str) -> None:
        if not self.history:
            raise ValueError("there is nothing to undo")
        del self.history[-2:]
        self.terminal.note(f"{len(self.history)} messages left")

    def _save(self, file: str) -> None:
        if not file:
            raise ValueError("/save FILE needs a file name")
        text = json.dumps({"messages": self._messages()}, ensure_ascii=False, indent=2)
        Path(file).expanduser().write_text(text + "\n", encoding="utf-8")
        self.terminal.note(f"saved to {file}")

    def _quit(self, _: str) -> bool:
        return False


def _summary(answer: ChatResponse, seconds: float) -> str:
    ended = {"length": "stopped by max_tokens or the model's length", "interrupted": "interrupted"}
    parts = (
        [] if answer.num_tokens is None else [f"{answer.num_tokens} tokens", f"{answer.num_tokens / seconds:.0f} tok/s"]
    )
    return ", ".join([*parts, *([ended[answer.reason]] if answer.reason in ended else [])])
