"""Tool calling of a chat request: offered tools, tool_choice, and the parser for the calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.entrypoints.http.errors import bad_request
from quire.entrypoints.openai.errors import refused_value
from quire.entrypoints.openai.protocol import ChatRequest
from quire.entrypoints.openai.tool_validation import check_tools, named_function
from quire.entrypoints.parsers.base import ParsedDelta, TextParser
from quire.entrypoints.parsers.tools.forced import NamedParser, RequiredParser
from quire.entrypoints.parsers.tools.registry import ParserFactory, tool_parser
from quire.entrypoints.parsers.tools.schema import arguments_schema, calls_schema
from quire.messages.sampling_params import SamplingParams
from quire.messages.structured import StructuredOutputsParams
from quire.tokenizer.tokenizer import Tokenizer

AUTO_IS_OFF = (
    'tool_choice "auto", which is the default with tools, is off on this server (--no-enable-auto-tool-choice or '
    '--tool-call-parser none); use "none", "required" or a named function'
)


class ToolSetup:
    """The server's tool-call parser and settings."""

    def __init__(self, parser: str | None, max_tools: int, tokenizer: Tokenizer | None = None) -> None:
        """`parser` is its name; without one the model cannot decide to call tools."""
        self.max_tools = max_tools
        self.factory: ParserFactory | None = tool_parser(parser) if parser is not None else None
        markers = getattr(self.factory, "markers", ())
        special = (tokenizer.special_id(marker) for marker in markers) if tokenizer is not None else ()
        self.visible = sorted({token for token in special if token is not None})

    def check(self, request: ChatRequest) -> None:
        """Validate tools and tool_choice."""
        check_tools(request.tools or [], self.max_tools)
        name = named_function(request.tool_choice)
        if name is not None or request.tool_choice == "required":
            if not request.tools:
                raise bad_request("tool_choice requires a call, but tools offers no function", "tool_choice")
            offered = [tool["function"]["name"] for tool in request.tools]
            if name is not None and name not in offered:
                raise bad_request(f"tool_choice names {name[:64]!r}, which is not in tools", "tool_choice")
        elif request.tools and request.tool_choice != "none" and self.factory is None:
            raise bad_request(AUTO_IS_OFF, "tool_choice")

    def use(self, request: ChatRequest) -> "ToolUse | None":
        """For a checked request; None if its response cannot hold calls."""
        if not request.tools or request.tool_choice == "none":
            return None
        name = named_function(request.tool_choice)
        parallel = request.parallel_tool_calls is not False
        if name is not None or request.tool_choice == "required":
            return ToolUse(request.tools, parallel, name, None, [])
        return ToolUse(request.tools, parallel, None, self.factory, self.visible)


@dataclass
class ToolUse:
    """A request's tool calls: `factory` parses the model's own format; without one a grammar forces JSON calls."""

    tools: Sequence[Mapping[str, Any]]
    parallel: bool
    name: str | None
    factory: ParserFactory | None
    visible: list[int]

    def parser(self, made: TextParser | None = None) -> TextParser:
        """A new parser, for one choice; or the one `made` by a reasoning format that reads calls too."""
        if self.factory is not None:
            parser = made or self.factory(self.tools)
            return parser if self.parallel else FirstCallOnly(parser)
        return RequiredParser(self.tools) if self.name is None else NamedParser(self.name, self.tools)

    def schema(self) -> dict[str, Any] | None:
        """The JSON schema that the response must match; None if the model decides."""
        if self.factory is not None:
            return None
        if self.name is None:
            return calls_schema(self.tools, self.parallel)
        return arguments_schema(self.tools, self.name)

    def adjust(self, params: SamplingParams) -> SamplingParams:
        schema = self.schema()
        if schema is None:
            return params.replace_unchecked(visible_token_ids=sorted({*params.visible_token_ids, *self.visible}))
        if params.structured_outputs is not None:
            raise bad_request("tool_choice and structured output both constrain the response; use one", "tool_choice")
        try:
            # If whitespace or additional properties are allowed anywhere, small models may generate nothing else until
            # max_tokens.
            form = StructuredOutputsParams(
                json=schema, disable_any_whitespace=True, disable_additional_properties=True, field="tool_choice"
            )
            return params.replace(structured_outputs=form)
        except ValueError as error:
            raise refused_value(error, ("tool_choice",), "tool_choice") from None


class FirstCallOnly:
    """Drops all calls but the first, for parallel_tool_calls=false."""

    def __init__(self, parser: TextParser) -> None:
        self.parser = parser

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> ParsedDelta:
        return self._first(self.parser.feed(text, token_ids))

    def finish(self) -> ParsedDelta:
        return self._first(self.parser.finish())

    def _first(self, delta: ParsedDelta) -> ParsedDelta:
        delta.tool_calls = [call for call in delta.tool_calls if call.index == 0]
        return delta
