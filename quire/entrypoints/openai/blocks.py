"""An answer as blocks, one after the other: reasoning, text, tool calls. For APIs whose streams open and close them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.entrypoints.http.errors import ApiError
from quire.entrypoints.http.generation import Batch
from quire.entrypoints.openai.output_parsing import OutputParsing
from quire.entrypoints.openai.output_reader import OutputReader
from quire.entrypoints.openai.response import KEEP_ALIVE, Usage
from quire.entrypoints.parsers.base import ParsedDelta, ToolCallDelta

REASONING, TEXT, CALL = "reasoning", "text", "call"


@dataclass
class Block:
    kind: str
    index: int
    call: ToolCallDelta | None = None  # its first delta
    parts: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)  # the API's own, such as an id
    open: bool = True

    @property
    def text(self) -> str:
        return "".join(self.parts)


class BlockAnswer(ABC):
    """Reads the outputs of one choice into blocks; a subclass encodes what opens, extends and closes them."""

    def __init__(self, parsing: OutputParsing | None, with_reasoning: bool = True) -> None:
        self.parsing = parsing
        self.with_reasoning = with_reasoning
        self.usage = Usage(with_prompt_details=True)
        self.blocks: list[Block] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._reader: OutputReader | None = None
        self._space = ""  # before text: dropped if none follows
        self._logprobs: list[Any] = []  # of text that is yet to come

    @abstractmethod
    def start(self, output: RequestOutput) -> bytes:
        """Events before the first block."""

    @abstractmethod
    def opened(self, block: Block) -> bytes: ...

    @abstractmethod
    def extended(self, block: Block, text: str, logprobs: list[Any]) -> bytes: ...

    @abstractmethod
    def closed(self, block: Block) -> bytes: ...

    @abstractmethod
    def last_events(self) -> bytes:
        """Events after the last block; `finish_reason` says how it ended."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes: ...

    @abstractmethod
    def encoded(self) -> bytes:
        """The whole response, of all blocks."""

    def token_logprobs(self, completion: CompletionOutput) -> list[Any]:
        """One for each token, where they are wanted."""
        return []

    @property
    def has_calls(self) -> bool:
        return any(block.kind == CALL for block in self.blocks)

    @property
    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def events(self, batch: Batch) -> bytes:
        return b"".join(part for _, output in batch for part in self._read(output))

    def end(self) -> bytes:
        return b"".join(self._end())

    def body(self, outputs: list[RequestOutput]) -> bytes:
        for output in outputs:
            for _ in self._read(output):
                pass
        for _ in self._end():
            pass
        return self.encoded()

    def _read(self, output: RequestOutput) -> Iterator[bytes]:
        reader = self._reader
        if reader is None:
            reader = self._reader = OutputReader(self.parsing, output.prompt or "")
            self.usage.prompt_tokens = len(output.prompt_token_ids)
            self.usage.cached_tokens = output.num_cached_tokens or 0
            self.usage.reasoning_tokens = 0
            yield self.start(output)
        for completion in output.outputs:
            self.usage.completion_tokens += len(completion.token_ids)
            if logprobs := self.token_logprobs(completion):
                # A token that ends the response is no text; a stop string may be part of several.
                ended = completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str)
                last = len(logprobs) - ended
                self._logprobs += logprobs[reader.first_visible(completion.token_ids) : last]
            self.usage.reasoning_tokens = (self.usage.reasoning_tokens or 0) + reader.reasoning_tokens(completion)
            yield from self._feed(reader.read(completion))
            if completion.finish_reason is not None:
                self.finish_reason, self.stop_reason = completion.finish_reason, completion.stop_reason
                yield from self._feed(reader.finish())

    def _end(self) -> Iterator[bytes]:
        if self.finish_reason is None:  # aborted: there was no final output
            if self._reader is not None:
                yield from self._feed(self._reader.finish())
            self.finish_reason = "abort"
        if self._space and not self.blocks:
            yield from self._text(TEXT, self._space)
        yield from self._close()
        yield self.last_events()

    def _feed(self, found: ParsedDelta) -> Iterator[bytes]:
        if found.reasoning and self.with_reasoning:
            yield from self._text(REASONING, found.reasoning)
        if found.content:
            text = self._space + found.content
            inside = self.blocks and self.blocks[-1].open and self.blocks[-1].kind == TEXT
            if inside or not text.isspace():
                self._space = ""
                yield from self._text(TEXT, text)
            else:
                self._space = text
        for call in found.tool_calls:
            yield from self._call(call)

    def _text(self, kind: str, text: str) -> Iterator[bytes]:
        if not (self.blocks and self.blocks[-1].open and self.blocks[-1].kind == kind):
            yield from self._open(Block(kind, len(self.blocks)))
        logprobs: list[Any] = []
        if kind == TEXT:
            logprobs, self._logprobs = self._logprobs, []
        yield self._extend(text, logprobs)

    def _call(self, call: ToolCallDelta) -> Iterator[bytes]:
        last = self.blocks[-1] if self.blocks else None
        if last is None or not last.open or last.call is None or last.call.index != call.index:
            if call.name is None:
                return  # the rest of a call that is closed
            self._space = ""
            yield from self._open(Block(CALL, len(self.blocks), call))
        if call.arguments:
            yield self._extend(call.arguments, [])

    def _open(self, block: Block) -> Iterator[bytes]:
        yield from self._close()
        self.blocks.append(block)
        yield self.opened(block)

    def _extend(self, text: str, logprobs: list[Any]) -> bytes:
        block = self.blocks[-1]
        block.parts.append(text)
        block.logprobs += logprobs
        return self.extended(block, text, logprobs)

    def _close(self) -> Iterator[bytes]:
        if self.blocks and self.blocks[-1].open:
            self.blocks[-1].open = False
            yield self.closed(self.blocks[-1])
