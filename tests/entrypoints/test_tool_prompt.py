"""Tools described to models whose chat template does not know them."""

import json
from typing import Any

import pytest

from quire.entrypoints.tool_prompt import describe_tools, takes_tools

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{# system #}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
TOOLS: Any = [{"type": "function", "function": {"name": "now", "description": "The time", "parameters": {}}}]
ASKED = {"role": "user", "content": "What time is it?"}


def call(id: str, arguments: str = '{"zone": "UTC"}') -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "now", "arguments": arguments}}


def test_which_templates_know_tools() -> None:
    assert takes_tools("{% if tools %}{{ tools | tojson }}{% endif %}")
    assert not takes_tools(CHATML) and not takes_tools("{% set tools = [] %}{{ tools }}")
    assert not takes_tools("{% if tools")


def test_the_system_message_describes_them() -> None:
    system, asked = describe_tools([ASKED], TOOLS, CHATML)
    assert asked == ASKED and system["role"] == "system"
    assert json.dumps(TOOLS[0]["function"]) in system["content"] and '"parameters"' in system["content"]


@pytest.mark.parametrize("content", ["Be brief.", [{"type": "text", "text": "Be brief."}]])
def test_after_a_system_message_of_the_request(content: Any) -> None:
    system, asked = describe_tools([{"role": "system", "content": content}, ASKED], TOOLS, CHATML)
    assert asked == ASKED and system["content"].startswith("Be brief.\n\nYou can call")


def test_templates_without_a_system_role() -> None:
    (only,) = describe_tools([{"role": "system", "content": "Be brief."}, ASKED], TOOLS, NO_SYSTEM)
    assert only["role"] == "user"
    assert only["content"].startswith("Be brief.\n\nYou can") and only["content"].endswith("What time is it?")


def test_calls_and_results_of_earlier_turns() -> None:
    history = [
        ASKED,
        {"role": "assistant", "content": "I look.", "tool_calls": [call("a"), call("b", "not JSON")]},
        {"role": "tool", "tool_call_id": "a", "content": "12:00"},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "13:00"}]},
    ]
    asked, called, results = describe_tools(history, None, CHATML)
    assert asked == ASKED
    said, _, calls = called["content"].partition("\n\n")
    assert said == "I look." and json.loads(calls) == [
        {"name": "now", "parameters": {"zone": "UTC"}},
        {"name": "now", "parameters": "not JSON"},
    ]
    assert results == {"role": "user", "content": "Result of now:\n12:00\n\nResult of now:\n13:00"}


def test_calls_of_a_wrong_shape() -> None:
    with pytest.raises(ValueError, match="tool_calls of a message must be"):
        describe_tools([{"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}], None, CHATML)


@pytest.mark.parametrize("id", [[], {}, None, 1])
def test_ids_of_a_wrong_type_name_no_call(id: Any) -> None:
    history = [
        {"role": "assistant", "content": None, "tool_calls": [call(id)]},
        {"role": "tool", "tool_call_id": id, "content": "12:00"},
    ]
    assert describe_tools(history, None, CHATML)[1]["content"] == "Result of the call:\n12:00"


def test_results_between_messages_are_one_message() -> None:
    result = {"role": "tool", "content": "12:00"}
    described = describe_tools([result, result, ASKED, result], None, CHATML)
    assert [message["role"] for message in described] == ["user", "user", "user"]
    one = "Result of the call:\n12:00"
    assert [message["content"] for message in described] == [f"{one}\n\n{one}", ASKED["content"], one]
