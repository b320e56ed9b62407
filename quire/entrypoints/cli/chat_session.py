"""A conversation with a model: its history, its settings, and the slash commands that change them."""

import difflib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quire.entrypoints.cli.sampling_flags import fields, with_value
from quire.entrypoints.cli.terminal import Terminal
from quire.entrypoints.interruption import interruption
from quire.messages.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from quire.engine.llm_engine import LLMEngine
    from quire.entrypoints.chat import ChatRenderer


class ChatSession:
    def __init__(
        self,
        engine: "LLMEngine",
        renderer: "ChatRenderer",
        terminal: Terminal,
        params: SamplingParams,
        system: str | None = None,
    ) -> None:
        self.engine = engine
        self.renderer = renderer
        self.terminal = terminal
        self.params = params
        self.system = system
        self.history: list[dict[str, str]] = []
        self.failed = False
        self._count = 0
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
        """Obey a command or answer a message; false at /quit. What goes wrong is said and changes nothing."""
        try:
            if message.startswith("/"):
                return self._obey(message)
            self.answer(message)
        except (ValueError, OSError) as error:
            self.failed = True
            self.terminal.error(str(error))
        return True

    def answer(self, text: str) -> None:
        asked: dict[str, str] = {"role": "user", "content": text}
        [prompt] = self.renderer.prompts([[*self._messages(), asked]])
        self._count += 1
        request_id = f"chat-{self._count}"
        self.engine.add_request(request_id, prompt, self.params.replace(output_kind=RequestOutputKind.DELTA))
        began, tokens, parts, reason, error = time.perf_counter(), 0, [], None, None
        with interruption() as interrupted:
            while reason is None and not interrupted():
                for output in self.engine.step():
                    completion = output.outputs[0]
                    parts.append(completion.text)
                    self.terminal.write_answer(completion.text)
                    tokens += len(completion.token_ids)
                    reason, error = completion.finish_reason, output.error
            if reason is None:
                self.engine.abort_request(request_id)
                reason = "interrupted"
        self.terminal.write("\n")
        if error is not None:
            raise ValueError(error)
        self.history += [asked, {"role": "assistant", "content": "".join(parts)}]
        seconds = time.perf_counter() - began
        ended = {"length": ", stopped by max_tokens or the model's length", "interrupted": ", interrupted"}
        self.terminal.note(f"{tokens} tokens, {tokens / seconds:.0f} tok/s{ended.get(reason, '')}")

    def _messages(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.history]

    def _obey(self, line: str) -> bool:
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
            'A line that ends in \\ goes on in the next; """ begins and ends a message of several lines.',
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
        changed = with_value(self.params, name.replace("-", "_"), value.strip())
        if changed.n != 1:
            raise ValueError("n is always 1 in a chat")
        self.params = changed
        self.terminal.note(f"{name} is {getattr(self.params, name.replace('-', '_'))!r}")

    def _show(self, _: str) -> None:
        defaults: Any = SamplingParams()
        shown = {"model": self.engine.model_name, "system": self.system, "messages": len(self.history)}
        for name in fields():
            value = getattr(self.params, name)
            if value != getattr(defaults, name) or name in ("temperature", "max_tokens"):
                shown[name] = msgspec.to_builtins(value)
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
