"""A server without flags: tools and reasoning work, and each flag changes what it says."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.config.server import ServerConfig
from quire.entrypoints.openai.routes import check
from tests.entrypoints.openai.test_parsed_chat import say, says
from tests.entrypoints.stub_server import StubServer, refusal, stub_server

HELLO: Any = [{"role": "user", "content": "What time is it?"}]
TOOLS: Any = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]
NAMED = {"type": "function", "function": {"name": "now"}}
KNOWS_TOOLS = "{% if tools %}[{{ tools[0].function.name }}]{% endif %}{{ messages[-1].content }}<think>"


def ask(server: StubServer, **fields: Any) -> Any:
    response = server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 50} | fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def prompt(server: StubServer, **fields: Any) -> str:
    """The rendered prompt of a chat request."""
    response = server.post(
        "/v1/chat/completions", {"messages": HELLO, "max_tokens": 1, "return_token_ids": True} | fields
    )
    assert response.status_code == 200, response.text
    ids = response.json()["prompt_token_ids"]
    return str(server.post("/detokenize", {"tokens": ids}).json()["prompt"])


def test_calls_of_a_model_without_format() -> None:
    with stub_server(says('[{"name": "now", "parameters": {}}]')) as server:
        assert server.server.context.parsers.tools == "json"
        for choice in (None, "auto", "required"):
            found = ask(server, tools=TOOLS, tool_choice=choice)
            assert found["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
            assert found["finish_reason"] == "tool_calls"
            assert found["message"]["content"] == ("" if choice == "required" else None)
        assert "tool_calls" not in ask(server, tools=TOOLS, tool_choice="none")["message"]
        assert "tool_calls" not in ask(server)["message"]
        say(server.engine, "{}")
        message = ask(server, tools=TOOLS, tool_choice=NAMED)["message"]
        assert message["tool_calls"][0]["function"]["name"] == "now" and message["content"] == ""
        say(server.engine, "It is noon.")
        assert ask(server, tools=TOOLS)["message"]["content"] == "It is noon."


def test_its_tools_are_in_the_system_message() -> None:
    with stub_server(says("Noon.")) as server:
        system, rest = prompt(server, tools=TOOLS).split("<|im_end|>", 1)
        assert json.dumps(TOOLS[0]["function"]) in system and "What time is it?" in rest
        assert "You can call" not in prompt(server, tools=TOOLS, tool_choice="none")
        assert prompt(server) == prompt(server, tools=[])
        calls = [{"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}]
        history = [*HELLO, {"role": "assistant", "tool_calls": calls}]
        after = prompt(server, tools=TOOLS, messages=[*history, {"role": "tool", "tool_call_id": "a", "content": "12"}])
        assert '<|im_start|>assistant\n[{"name": "now", "parameters": {}}]' in after
        assert "<|im_start|>user\nResult of now:\n12" in after
        tokens = server.post("/tokenize", {"messages": HELLO, "tools": TOOLS}).json()["tokens"]
        assert server.post("/detokenize", {"tokens": tokens}).json()["prompt"] == prompt(server, tools=TOOLS)


def test_tools_can_be_off() -> None:
    for config in (ServerConfig(enable_auto_tool_choice=False), ServerConfig(tool_call_parser="none")):
        with stub_server(says("[]"), config) as server:
            response = server.post("/v1/chat/completions", {"messages": HELLO, "tools": TOOLS})
            assert "--no-enable-auto-tool-choice" in refusal(response)
            ask(server, tools=TOOLS, tool_choice="none")


def engine_with(template: str, text: str) -> Any:
    engine = says(text)
    engine.config.model.chat_template = template
    return engine


def test_the_template_chooses_the_reasoning_parser() -> None:
    with stub_server(engine_with(KNOWS_TOOLS, "Hm.</think>Noon.")) as server:
        assert str(server.server.context.parsers) == "tool calls: json, reasoning: deepseek_v3"
        message = ask(server)["message"]
        assert (message["reasoning"], message["content"]) == ("Hm.", "Noon.")
    with stub_server(engine_with(KNOWS_TOOLS, "Hm.</think>Noon."), ServerConfig(reasoning_parser="none")) as server:
        assert ask(server)["message"]["content"] == "Hm.</think>Noon."


def test_channels_of_one_parser() -> None:
    """The reasoning format and the tool parser of gpt-oss read the same markers."""
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.now "
        "<|constrain|>json<|message|>{}<|call|>"
    )
    config = ServerConfig(reasoning_parser="openai_gptoss", tool_call_parser="openai")
    with stub_server(says(text), config) as server:
        found = ask(server, tools=TOOLS)
        assert found["message"]["reasoning"] == "Hm." and found["message"]["tool_calls"][0]["function"]["name"] == "now"
        say(server.engine, '<|channel|>final<|message|>[{"name": "now", "parameters": {}}]<|return|>')
        assert ask(server, tools=TOOLS, tool_choice="required")["message"]["tool_calls"]
        assert ask(server)["message"]["content"].startswith('[{"name"')


def test_tools_without_a_choice() -> None:
    with stub_server(engine_with(KNOWS_TOOLS, "x")) as server:
        assert prompt(server, tools=TOOLS, tool_choice="none").startswith("[now]")
    with stub_server(engine_with(KNOWS_TOOLS, "x"), ServerConfig(exclude_tools_when_tool_choice_none=True)) as server:
        assert prompt(server, tools=TOOLS, tool_choice="none").startswith("What")
        assert prompt(server, tools=TOOLS).startswith("[now]")


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_response_role(tools: Any) -> None:
    with stub_server(says("Noon."), ServerConfig(response_role="narrator")) as server:
        assert ask(server, tools=tools)["message"]["role"] == "narrator"
        continued = {"continue_final_message": True, "messages": [*HELLO, {"role": "assistant", "content": "It is"}]}
        assert ask(server, tools=tools, **continued)["message"]["role"] == "assistant"
        stream = server.post("/v1/chat/completions", {"messages": HELLO, "stream": True, "tools": tools}).text
        assert '"role":"narrator"' in stream and '"role":"assistant"' not in stream


def test_default_chat_template_kwargs() -> None:
    engine = engine_with("{{ mood }} {{ messages[-1].content }}", "x")
    with stub_server(engine, ServerConfig(default_chat_template_kwargs={"mood": "calm"})) as server:
        assert prompt(server).startswith("calm What")
        assert prompt(server, chat_template_kwargs={"mood": "wild"}).startswith("wild What")
    with pytest.raises(ValueError, match="--default-chat-template-kwargs"):
        ServerConfig(default_chat_template_kwargs=["mood"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wanted", "shown"), [("auto", "string: What"), ("string", "string: What"), ("openai", "list: text What")]
)
def test_content_format(wanted: str, shown: str) -> None:
    template = (
        "{% set c = messages[-1].content %}"
        "{% if c is string %}string: {{ c }}{% else %}list: {{ c[0].type }} {{ c[0].text }}{% endif %}"
    )
    with stub_server(engine_with(template, "x"), ServerConfig(chat_template_content_format=wanted)) as server:
        assert prompt(server).startswith(shown)
    with pytest.raises(ValueError, match="auto, string, openai"):
        ServerConfig(chat_template_content_format="parts")


PLUGIN = '''
from quire.entrypoints.parsers.reasoning import ReasoningParserManager, TagFormat, register_reasoning_parser

register_reasoning_parser("loud")(TagFormat(("HMM",), ("SO",)))

@ReasoningParserManager.register_module("louder")
class Louder(TagFormat):
    """As plugins of vLLM register."""
'''


def test_reasoning_parser_plugin(tmp_path: Path) -> None:
    file = tmp_path / "loud.py"
    file.write_text(PLUGIN)
    config = ServerConfig(reasoning_parser="loud", reasoning_parser_plugin=str(file))
    with stub_server(says("HMM why SO because"), config) as server:
        message = ask(server)["message"]
        assert (message["reasoning"], message["content"]) == (" why ", " because")
    check(ServerConfig(reasoning_parser="louder", reasoning_parser_plugin=str(file)))
    with pytest.raises(ValueError, match=r"--reasoning-parser-plugin /nowhere.* cannot be imported"):
        check(ServerConfig(reasoning_parser_plugin="/nowhere.py"))


def test_names_are_checked_before_the_model_is_loaded() -> None:
    check(ServerConfig(reasoning_parser="none", tool_call_parser="none"))
    # vLLM's defaults in a configuration file
    check(ServerConfig(reasoning_parser="", tool_parser_plugin="", reasoning_parser_plugin=""))
    with pytest.raises(ValueError, match="--reasoning-parser nothing is not known"):
        check(ServerConfig(reasoning_parser="nothing"))
    with pytest.raises(ValueError, match="--tool-call-parser nothing is not known"):
        check(ServerConfig(tool_call_parser="nothing"))
