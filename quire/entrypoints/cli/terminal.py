"""Reads messages from and writes answers to a terminal, a pipe or a file."""

import sys
from typing import IO

from quire.config.environment import NO_COLOR, TERM

# A model must not be able to move the cursor, change the title or paste into the user's shell.
CONTROL_CHARACTERS = {code: "\ufffd" for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"}
STYLES = {"prompt": "1;36", "dim": "2", "error": "31"}
QUOTES = '"""'


class Terminal:
    def __init__(self, reader: IO[str] | None = None, writer: IO[str] | None = None) -> None:
        self.reader = reader or sys.stdin
        self.writer = writer or sys.stdout
        self.interactive = self.reader.isatty()
        self.is_screen = self.writer.isatty()
        self.colours = self.is_screen and not NO_COLOR.get() and TERM.get() != "dumb"
        self.has_readline = self.interactive and self.is_screen and _load_readline()

    def read_message(self) -> str:
        """One message: a line, lines that end in a backslash and the next one, or lines between triple quotes.

        EOFError at the end of input, KeyboardInterrupt at Ctrl-C.
        """
        line = self._read_line(">>> ")
        if line.lstrip().startswith(QUOTES):
            return self._read_quoted(line.lstrip().removeprefix(QUOTES))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            try:
                lines.append(self._read_line("... "))
            except EOFError:
                break
        return "\n".join(lines)

    def _read_quoted(self, line: str) -> str:
        lines = []
        while QUOTES not in line:
            lines.append(line)
            try:
                line = self._read_line("... ")
            except EOFError:
                return "\n".join(lines).strip("\n")
        return "\n".join([*lines, line.partition(QUOTES)[0]]).strip("\n")

    def _read_line(self, prompt: str) -> str:
        if self.has_readline:
            # readline must know the zero-width characters, or it wraps lines at the wrong column.
            begin, end = (f"\001\033[{STYLES['prompt']}m\002", "\001\033[0m\002") if self.colours else ("", "")
            return input(begin + prompt + end)
        if self.interactive:
            self.write(self.styled("prompt", prompt))
        line = self.reader.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n").removesuffix("\r")

    def write(self, text: str) -> None:
        self.writer.write(text)
        self.writer.flush()

    def write_answer(self, text: str) -> None:
        self.write(text.translate(CONTROL_CHARACTERS) if self.is_screen else text)

    def note(self, text: str) -> None:
        """Printed only interactively, so that scripts read just the answers."""
        if self.interactive:
            self.write(self.styled("dim", text) + "\n")

    def error(self, text: str) -> None:
        if self.interactive and self.is_screen:
            self.write(self.styled("error", f"error: {text}") + "\n")
        else:
            print(f"quire: error: {text}", file=sys.stderr)

    def styled(self, style: str, text: str) -> str:
        return f"\033[{STYLES[style]}m{text}\033[0m" if self.colours else text


def _load_readline() -> bool:
    try:
        import readline  # noqa: F401  gives input() a history and line editing
    except ImportError:
        return False
    return True
