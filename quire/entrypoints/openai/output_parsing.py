"""The parsers for a response's text, and the sampling parameters that they need."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire.entrypoints.http.context import ServerContext
from quire.entrypoints.http.errors import bad_request
from quire.entrypoints.openai.tool_request import ToolUse
from quire.entrypoints.parsers.base import Chain, TextParser
from quire.entrypoints.parsers.reasoning import ReasoningFormat, reasoning_format
from quire.entrypoints.parsers.reasoning.channels import ChannelFormat
from quire.entrypoints.parsers.reasoning.tags import SuffixedFormat
from quire.messages.sampling_params import MAX_TAG_TOKENS, ReasoningTokens, SamplingParams
from quire.tokenizer.tokenizer import Tokenizer

BUDGET = "thinking_token_budget"
MAX_BEFORE_START = 32  # tokens; a response without a start tag by then has no reasoning


class ReasoningSetup:
    """A reasoning format's tags as tokens of the served model."""

    def __init__(self, name: str, tokenizer: Tokenizer, given: Mapping[str, str] | None = None) -> None:
        """`given`: --reasoning-config."""
        given = given or {}
        self.format: ReasoningFormat = reasoning_format(name)
        if isinstance(self.format, SuffixedFormat):
            added = tokenizer.backend.get_added_tokens_decoder().values()
            self.format = self.format.for_tokens(token.content for token in added)
        begin, forced = given.get("reasoning_start_str"), given.get("reasoning_end_str")
        self.start = tokenizer.encode(begin or self.format.start, add_special_tokens=False)
        self.end = tokenizer.encode(self.format.end, add_special_tokens=False)
        self.budget_end = tokenizer.encode(forced, add_special_tokens=False) if forced else None
        if begin and len(self.start) != 1:
            raise ValueError(f"reasoning_start_str is {begin!r}, {len(self.start)} tokens of this model; allowed: one")
        if len(self.budget_end or ()) > MAX_TAG_TOKENS:
            raise ValueError(f"reasoning_end_str is more than {MAX_TAG_TOKENS} tokens of this model")
        special = (tokenizer.special_id(marker) for marker in self.format.markers)
        self.visible = sorted({token for token in special if token is not None})
        ends = [tokenizer.encode(end, add_special_tokens=False) for end in self.format.end_markers]
        # A tag of several tokens is tokenized differently depending on its neighbours, so it cannot be matched by id.
        self.end_ids = frozenset(ids[0] for ids in ends if len(ids) == 1)
        self.countable = len(self.start) == 1 and len(self.end) == 1

    @classmethod
    def of(cls, context: ServerContext) -> "ReasoningSetup | None":
        name, tokenizer = context.parsers.reasoning, context.engine.tokenizer
        return cls(name, tokenizer, context.config.reasoning_config) if name and tokenizer is not None else None

    def adjust(self, params: SamplingParams, is_open: bool | None) -> SamplingParams:
        """Tells the engine the tags: grammars apply after the reasoning, a thinking budget ends it."""
        if params.thinking_token_budget is not None and not self.countable:
            tags = f"{self.format.start!r} and {self.format.end!r}"
            message = f"{BUDGET}: {tags} are not single tokens of this model, so reasoning cannot be counted"
            raise bad_request(message, BUDGET)
        reasoning = ReasoningTokens(start=self.start, end=self.end, open=is_open, budget_end=self.budget_end)
        visible = sorted({*params.visible_token_ids, *self.visible})
        return params.replace_unchecked(reasoning=reasoning, visible_token_ids=visible)


class ReasoningCount:
    """Counts reasoning tokens, without the tags."""

    def __init__(self, start: int, ends: frozenset[int], is_open: bool | None) -> None:
        self.start, self.ends = start, ends
        self.inside = is_open is True
        self.over = is_open is False
        self.seen = 0

    def add(self, token_ids: Sequence[int]) -> int:
        """The number of reasoning tokens among `token_ids`."""
        count = 0
        for token in token_ids:
            if self.over:
                break
            self.seen += 1
            if token in self.ends:
                self.over = True
            elif token == self.start:
                self.inside = True
            elif self.inside:
                count += 1
            elif self.seen >= MAX_BEFORE_START:
                self.over = True
        return count


@dataclass
class OutputParsing:
    """Parsers and parameters for one request."""

    reasoning: ReasoningSetup | None = None
    continued: str | None = None  # the final message that continue_final_message continues
    tools: ToolUse | None = None

    @property
    def forces_calls(self) -> bool:
        return self.tools is not None and self.tools.factory is None

    def adjust(self, params: SamplingParams, prompt: str) -> SamplingParams:
        if self.tools is not None:
            params = self.tools.adjust(params)
        return params if self.reasoning is None else self.reasoning.adjust(params, self.is_open(prompt))

    def is_open(self, prompt: str) -> bool | None:
        """See ReasoningFormat.is_open()."""
        if self.reasoning is None:
            return False
        if self.continued:
            return self.reasoning.format.is_open(self.continued, continues=True)
        return self.reasoning.format.is_open(prompt)

    def parser(self, is_open: bool | None) -> TextParser:
        """A new parser, for one choice."""
        if self.reasoning is None:
            assert self.tools is not None
            return self.tools.parser()
        format, tools = self.reasoning.format, self.tools
        if tools is not None and isinstance(format, ChannelFormat) and tools.factory is format.factory:
            return tools.parser(format.with_calls(tools.tools, is_open))
        first = format.parser(is_open)
        return first if tools is None else Chain(first, tools.parser())

    def count(self, is_open: bool | None) -> ReasoningCount | None:
        if self.reasoning is None or not self.reasoning.countable:
            return None
        return ReasoningCount(self.reasoning.start[0], self.reasoning.end_ids, is_open)
