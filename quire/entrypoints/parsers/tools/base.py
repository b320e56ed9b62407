"""Base class of the tool-call parsers."""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from typing import Any, ClassVar

from quire.entrypoints.parsers.base import ParsedDelta, ToolCallDelta
from quire.entrypoints.parsers.tools.reader import Malformed, Reader, Reading

MAX_NAME = 256  # characters; longer text is not a function's name
MAX_CALLS = 1024  # in one response


class ToolParser(ABC):
    """Splits generated text into content and tool calls, incrementally.

    A subclass writes `steps` as if the whole text were in `self.reader`. What it emits with `content`, `call` and
    `arguments` is sent to the client at once, so it must emit a call only once the text cannot be content any more.
    White space next to a call is not content.
    """

    markers: ClassVar[tuple[str, ...]] = ()  # texts that must not be skipped as special tokens

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        functions = [tool.get("function", tool) for tool in tools]
        self.schemas: dict[str, Mapping[str, Any]] = {f["name"]: f.get("parameters") or {} for f in functions}
        self.reader = Reader()
        self.num_calls = 0
        # Emitted since the last delta, as lists: repeated string concatenation would be quadratic.
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._arguments: list[str] = []  # of the last call
        self._calls: list[ToolCallDelta] = []
        self._space: list[str] = []
        self._beside_call = False
        self._steps: Generator[None, None, None] | None = self.steps()

    @abstractmethod
    def steps(self) -> Reading[None]:
        """Parse to the end of the text."""

    def new_id(self) -> str:
        return f"call_{uuid.uuid4().hex}"

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> ParsedDelta:
        if text:
            self.reader.add(text)
            self._advance()
        return self._flush()

    def finish(self) -> ParsedDelta:
        self.reader.ended = True
        self._advance()
        if self._space and not self._beside_call:
            self._content += self._space
        self._space.clear()
        return self._flush()

    def _advance(self) -> None:
        try:
            ended = self._steps is None or next(self._steps, self) is self
        except Malformed:
            ended = True
            self.content(self.reader.rollback())
        if ended:
            self._steps = None
            self.content(self.reader.consume(len(self.reader.text) - self.reader.at))

    def _flush(self) -> ParsedDelta:
        self._end_arguments()
        delta = ParsedDelta("".join(self._content), "".join(self._reasoning), self._calls)
        self._content, self._reasoning, self._calls = [], [], []
        return delta

    def _end_arguments(self) -> None:
        if self._arguments:
            self._calls.append(ToolCallDelta(self.num_calls - 1, arguments="".join(self._arguments)))
            self._arguments = []

    # For subclasses

    def content(self, text: str) -> None:
        solid = text.rstrip()
        if solid:
            if not self._beside_call:
                self._content += self._space
            self._content.append(solid.lstrip() if self._beside_call else solid)
            self._space.clear()
            self._beside_call = False
        if len(solid) < len(text):
            self._space.append(text[len(solid) :])

    def drop_space(self) -> None:
        """White space before here, if nothing but that follows a text, is not content."""
        self._space.clear()

    def reasoning(self, text: str) -> None:
        self._reasoning.append(text)

    def call(self, name: str, id: str | None = None) -> None:
        """Start a call: it is sent to the client and cannot be revoked."""
        if self.num_calls >= MAX_CALLS:
            raise Malformed
        self._end_arguments()
        self.reader.commit()
        self._space.clear()
        self._beside_call = True
        self._calls.append(ToolCallDelta(self.num_calls, id or self.new_id(), name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """More of the last call's arguments."""
        if text:
            self._arguments.append(text)

    def attempt(self, reading: Reading[None], kept: str = "") -> Reading[bool]:
        """Parse a call. If malformed, the text becomes content, preceded by its opening marker `kept`."""
        self.reader.mark()
        before = self.num_calls
        try:
            yield from reading
        except Malformed:
            if self.num_calls == before:
                self.content(kept)
            self.content(self.reader.rollback())
            return False
        self.reader.commit()
        return True
