"""Tools and tool_choice of requests."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from quire.config.server import ServerConfig
from quire.entrypoints.http.errors import ApiError
from quire.entrypoints.openai.protocol import ChatRequest
from quire.entrypoints.openai.routes import check
from quire.entrypoints.openai.tool_request import ToolSetup, ToolUse
from quire.entrypoints.openai.tool_validation import MAX_SCHEMA_BYTES
from quire.entrypoints.parsers.tools import registry
from quire.entrypoints.parsers.tools.registry import known_parsers, tool_parser
from quire.messages.sampling_params import SamplingParams
from tests.entrypoints.tools.parsed import TOOLS, Result, cuts, parse
from tests.entrypoints.vllm_parser_names import TOOL_PARSERS

AUTO = ToolSetup("hermes", max_tools=128)
OFF = ToolSetup(None, max_tools=128)
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def request(tools: Any = TOOLS, **fields: Any) -> ChatRequest:
    return ChatRequest(messages=[{"role": "user", "content": "Hello"}], tools=tools, **fields)


def tool(name: Any = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def used(setup: ToolSetup, asked: ChatRequest) -> ToolUse | None:
    setup.check(asked)
    return setup.use(asked)


def refused(asked: ChatRequest, setup: ToolSetup = AUTO) -> ApiError:
    with pytest.raises(ApiError) as error:
        setup.check(asked)
    assert error.value.status == 400
    return error.value


def deep(levels: int) -> Any:
    schema: Any = {}
    for _ in range(levels):
        schema = {"properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        ([{"type": "custom", "custom": {"name": "x"}}], "tools[0].type is 'custom'"),
        ([{"type": "function"}], "tools[0].function must be an object"),
        ([tool(), tool(3)], "tools[1].function.name must be"),
        ([tool("")], "tools[0].function.name must be"),
        ([tool("a b")], "tools[0].function.name must be"),
        ([tool("x" * 129)], "tools[0].function.name must be"),
        ([tool(), tool()], "tools[1].function.name is 'f'"),
        ([tool(description=3)], "tools[0].function.description"),
        ([tool(strict="yes")], "tools[0].function.strict"),
        ([tool(parameters=[])], "tools[0].function.parameters must be"),
        ([tool(parameters={"type": "string"})], "tools[0].function.parameters must be"),
        ([tool(parameters={"properties": []})], "tools[0].function.parameters.properties"),
        ([tool(parameters=deep(100))], "nested more than"),
        ([tool(parameters={"title": "x" * MAX_SCHEMA_BYTES})], "bytes; at most"),
        ([tool(f"f{i}", parameters={"title": "x" * 250_000}) for i in range(5)], "tools has"),
        ([tool(f"f{i}") for i in range(129)], "at most 128 are allowed (--max-tools)"),
    ],
)
def test_tools_that_are_refused(tools: Any, says: str) -> None:
    error = refused(request(tools))
    assert says in error.message and error.param == "tools"


@pytest.mark.parametrize(
    ("tools", "choice", "says"),
    [
        (TOOLS, "sometimes", "tool_choice must be none, auto, required"),
        (TOOLS, {"type": "function"}, "tool_choice must be"),
        (TOOLS, {"type": "function", "function": {"name": "other"}}, "which is not in tools"),
        (None, "required", "tools offers no function"),
        ([], NAMED, "tools offers no function"),
    ],
)
def test_choices_that_are_refused(tools: Any, choice: Any, says: str) -> None:
    error = refused(request(tools, tool_choice=choice))
    assert says in error.message and error.param == "tool_choice"


@pytest.mark.parametrize("choice", [None, "auto"])
def test_auto_that_is_off(choice: str | None) -> None:
    assert "is off on this server (--no-enable-auto-tool-choice" in refused(request(tool_choice=choice), OFF).message


def test_none_offers_nothing() -> None:
    assert used(OFF, request(tool_choice="none")) is None
    assert used(AUTO, request([])) is None
    assert used(AUTO, request(None)) is None


def test_auto_reads_the_models_format() -> None:
    use = used(AUTO, request())
    assert use is not None and use.schema() is None
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert parse(use.parser(), [call, call]).calls == [("now", "{}")] * 2
    use = used(AUTO, request(parallel_tool_calls=False))
    assert use is not None and parse(use.parser(), [call, "\n", call]).calls == [("now", "{}")]


def same(use: ToolUse, text: str) -> Result:
    expected = parse(use.parser(), [text])
    for pieces in cuts(text):
        found = parse(use.parser(), pieces)
        assert (found.content, found.calls) == (expected.content, expected.calls)
    return expected


def test_required() -> None:
    use = used(OFF, request(tool_choice="required"))
    assert use is not None
    schema = use.schema()
    good = [{"name": "get_weather", "parameters": {"city": "Oslo"}}, {"name": "now", "parameters": {}}]
    jsonschema.validate(good, schema)
    wrong: list[Any] = [
        [],
        {},
        [{"name": "other", "parameters": {}}],
        [{"name": "now"}],
        [{"name": "now", "parameters": {"x": 1}}],
    ]
    for bad in wrong:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)
    assert same(use, json.dumps(good)).parsed == [("get_weather", {"city": "Oslo"}), ("now", {})]
    assert same(use, json.dumps(good, indent=2) + "\n").content == ""
    cut = same(use, '[{"name": "get_weather", "parameters": {"city": "Os')
    assert cut.calls == [("get_weather", '{"city": "Os')]
    assert same(use, "no grammar was there").content == "no grammar was there"


def test_required_and_not_parallel() -> None:
    use = used(OFF, request(tool_choice="required", parallel_tool_calls=False))
    assert use is not None
    one = {"name": "now", "parameters": {}}
    jsonschema.validate([one], use.schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([one, one], use.schema())


def test_references_within_a_functions_schema_still_hold() -> None:
    tree = {
        "properties": {"root": {"$ref": "#/$defs/node"}, "self": {"$ref": "#"}},
        "required": ["root"],
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["id"]}},
    }
    use = used(OFF, request([tool("a"), tool("b", parameters=tree)], tool_choice="required"))
    assert use is not None

    def check(arguments: Any) -> None:
        jsonschema.validate([{"name": "b", "parameters": arguments}], use.schema())

    check({"root": {"id": 1, "next": {"id": 2}}, "self": {"root": {"id": 3}}})
    wrong: list[Any] = [{"root": {"id": 1, "next": {}}}, {"root": {"id": 1}, "self": {}}, {"self": {}}]
    for bad in wrong:
        with pytest.raises(jsonschema.ValidationError):
            check(bad)


def test_named() -> None:
    use = used(OFF, request(tool_choice=NAMED))
    assert use is not None and use.schema() == TOOLS[0]["function"]["parameters"]
    assert same(use, ' {"city": "Oslo",\n "days": 3}\n').parsed == [("get_weather", {"city": "Oslo", "days": 3})]
    assert same(use, "Oslo").content == "Oslo"


def test_the_grammar_is_in_the_parameters() -> None:
    use = used(OFF, request(tool_choice="required"))
    assert use is not None
    params = use.adjust(SamplingParams())
    assert params.structured_outputs is not None
    assert json.loads(params.structured_outputs.text) == use.schema()
    with pytest.raises(ApiError, match="both constrain"):
        use.adjust(params)
    auto = used(AUTO, request())
    assert auto is not None and auto.adjust(SamplingParams()).structured_outputs is None


def test_all_parsers_can_be_made() -> None:
    for name in known_parsers():
        assert parse(tool_parser(name)(TOOLS), ["Hello"]).content == "Hello"


def test_vllms_names_are_known() -> None:
    assert set(TOOL_PARSERS) - set(known_parsers()) == {"hf"}
    with pytest.raises(ValueError, match="--tool-call-parser hf is not available yet"):
        tool_parser("hf")


PLUGIN = '''
from quire.entrypoints.parsers.tools import ToolParser, ToolParserManager, register_tool_parser

@register_tool_parser("shouting")
class Shouting(ToolParser):
    """CALL name;"""

    markers = ("CALL",)

    def steps(self):
        while (yield from self.reader.until("CALL ", emit=self.content)):
            pieces = []
            yield from self.reader.until(";", emit=pieces.append)
            self.call("".join(pieces))
            self.arguments("{}")

ToolParserManager.register_module(["loud", "louder"])(Shouting)  # as plugins of vLLM do
'''


def test_custom_parsers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "shouting_parser.py"
    file.write_text(PLUGIN)
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.syspath_prepend(tmp_path)
    check(ServerConfig(tool_call_parser="shouting", tool_parser_plugin=str(file)))
    for name in ("shouting", "shouting_parser:Shouting", "loud"):
        use = used(ToolSetup(name, 128), request())
        assert use is not None
        result = same(use, "Well. CALL now; Then CALL f;")
        assert result.calls == [("now", "{}"), ("f", "{}")] and result.content == "Well.Then"


def test_a_registered_class_with_another_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})

    @registry.ToolParserManager.register_module("other")  # type: ignore[type-var]
    class Other:
        def __init__(self, tokenizer: Any, tools: Any = None) -> None:
            pass

    with pytest.raises(ValueError, match="the tool parser other does not create a text parser"):
        tool_parser("other")
    with pytest.raises(ValueError, match="hermes is registered already"):
        registry.ToolParserManager.register_module("hermes", force=False)(Other)  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("parser", "plugin", "says"),
    [
        ("nothing", None, "is not known; use one of apertus, .*hermes"),
        ("nowhere:Parser", None, "cannot be imported"),
        ("json:nothing", None, "cannot be imported"),
        ("json:dumps", None, "does not create a text parser"),
        ("json:JSONDecoder", None, "must be callable with the list of tools"),
        ("hermes", "nowhere.module", "--tool-parser-plugin nowhere.module cannot be imported"),
        ("hermes", "/nowhere/plugin.py", "cannot be imported"),
    ],
)
def test_parsers_that_cannot_be_used(parser: str, plugin: str | None, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check(ServerConfig(tool_call_parser=parser, tool_parser_plugin=plugin))
