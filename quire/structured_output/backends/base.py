"""The interface of a structured-output backend."""

from typing import Protocol

import numpy as np

from quire.messages.structured import StructuredOutputsParams


class GrammarError(ValueError):
    """The grammar cannot be compiled, or the matcher failed. The message is for the user who sent it."""


class GrammarBusyError(Exception):
    """No compiler is free for the grammar now. The message is for the user who sent it."""


class Matcher(Protocol):
    """One request's state in its grammar. Advanced by text tokens, never by the token that ends the output."""

    def accept(self, token: int) -> bool:
        """Advance by one token. False, with the state unchanged, if the grammar does not allow it here."""
        ...

    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted tokens."""
        ...

    def fill(self, row: np.ndarray) -> None:
        """Write the bitmask (structured_output/bitmask.py) of tokens allowed next. The bit of the vocabulary's `end_id`
        says whether the output may end here."""
        ...


class CompiledGrammar(Protocol):
    """A grammar compiled for this engine's vocabulary, shared by all requests with the same grammar."""

    num_bytes: int  # approximate memory

    def matcher(self) -> Matcher: ...


class Backend(Protocol):
    name: str

    def refusal(self, spec: StructuredOutputsParams) -> str | None:
        """Why this backend cannot enforce the request exactly; None if it can. Cheap."""
        ...

    def compile(self, spec: StructuredOutputsParams) -> CompiledGrammar:
        """May take seconds, so it is called on a compiler thread. GrammarError if the grammar is invalid."""
        ...


def first_line(error: object) -> str:
    """The reason in a library's error message, without source location and call stack."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    line = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    if line.startswith("[") and ": " in line:  # "[07:24:05] /project/cpp/file.cc:83: the reason"
        line = line.split(": ", 1)[1]
    return line[:500]
