"""What a grammar library must offer to serve here."""

from typing import Protocol

import numpy as np

from quire.messages.structured import StructuredOutputsParams


class GrammarError(ValueError):
    """The grammar cannot be compiled, or cannot go on. The message is for the user who sent it."""


class GrammarBusyError(Exception):
    """No compiler is free for the grammar now. The message is for the user who sent it."""


class Matcher(Protocol):
    """One request's place in its grammar. Moves by text tokens; the token that ends the output is never passed in."""

    def accept(self, token: int) -> bool:
        """Move on. False, and no move, if the grammar does not allow the token here."""
        ...

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens."""
        ...

    def fill(self, row: np.ndarray) -> None:
        """Set bit t % 32 of int32 word t // 32 for every token t that may come next, clear all others. The
        vocabulary's `end_id` stands for the end: its bit says whether the output may stop here."""
        ...


class Compiled(Protocol):
    """A grammar for this engine's vocabulary, shared by all requests that ask for it."""

    num_bytes: int  # about what it takes in memory

    def matcher(self) -> Matcher: ...


class Backend(Protocol):
    name: str

    def refusal(self, spec: StructuredOutputsParams) -> str | None:
        """Why this backend would not enforce the request exactly; None if it does. Quick."""
        ...

    def compile(self, spec: StructuredOutputsParams) -> Compiled:
        """May take seconds, so it is called on a compiler's thread. GrammarError if the grammar is wrong."""
        ...


def first_line(error: object) -> str:
    """The reason in a library's message, without its source line and its call stack."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    line = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    if line.startswith("[") and ": " in line:  # "[07:24:05] /project/cpp/file.cc:83: the reason"
        line = line.split(": ", 1)[1]
    return line[:500]
