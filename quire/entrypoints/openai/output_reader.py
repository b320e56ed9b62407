"""Reads a choice's output: its text split into content, reasoning and tool calls, and how much of it is reasoning."""

from collections.abc import Sequence

from quire.engine.outputs import CompletionOutput
from quire.entrypoints.openai.output_parsing import OutputParsing
from quire.entrypoints.parsers.base import ParsedDelta


class OutputReader:
    """For one choice. Without `parsing` the text is the content."""

    def __init__(self, parsing: OutputParsing | None, prompt: str) -> None:
        is_open = parsing.is_open(prompt) if parsing is not None else False
        self._parser = parsing.parser(is_open) if parsing is not None else None
        self._count = parsing.count(is_open) if parsing is not None else None

    @property
    def counts(self) -> bool:
        """Whether the number of reasoning tokens can be known."""
        return self._count is not None

    def read(self, completion: CompletionOutput) -> ParsedDelta:
        if self._parser is None:
            return ParsedDelta(completion.text)
        return self._parser.feed(completion.text, completion.token_ids)

    def finish(self) -> ParsedDelta:
        """What was held back."""
        return ParsedDelta() if self._parser is None else self._parser.finish()

    def reasoning_tokens(self, completion: CompletionOutput) -> int:
        """How many of the output's tokens are reasoning."""
        return 0 if self._count is None else self._count.add(completion.token_ids)

    def first_visible(self, token_ids: Sequence[int]) -> int:
        """The place of the first of these tokens, which are the next to be counted, that is no reasoning."""
        count = self._count
        if count is None or count.over:
            return 0
        ends = (place + 1 for place, token in enumerate(token_ids) if token in count.ends)
        inside = count.inside or count.start in token_ids
        return next(ends, len(token_ids) if inside else 0)
