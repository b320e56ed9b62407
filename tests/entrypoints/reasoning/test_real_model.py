"""Reasoning, a thinking budget, and structured output after it, in one real server."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.entrypoints.server_process import ServerProcess, server_process

HELLO: Any = [{"role": "user", "content": "Which is larger, 17 or 71?"}]
BUDGET = 9
PARAMETERS = {
    "type": "object",
    "properties": {"larger": {"enum": [17, 71]}, "sure": {"type": "boolean"}},
    "required": ["larger", "sure"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "answer", "parameters": PARAMETERS}}
NAMED: Any = {"type": "function", "function": {"name": "answer"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ("--served-model-name", "tiny", "--num-gpu-blocks-override", "256")
    parser = ("--reasoning-parser", "tests.entrypoints.reasoning.own_format:FORMAT")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", ".")
        with server_process(tmp_path_factory.mktemp("reasoning"), *flags, *parser) as one:
            yield one


def asked(server: ServerProcess, **fields: Any) -> tuple[Any, str, str]:
    """The choice of a whole response, and the streamed reasoning and content of the same request."""
    extra = {"thinking_token_budget": BUDGET} | fields.pop("extra_body", {})
    fields = {"model": "tiny", "messages": HELLO, "temperature": 0.8, "seed": 3, "max_tokens": 120} | fields
    create = server.client().chat.completions.create
    whole = create(**fields, extra_body=extra)
    details = whole.usage.completion_tokens_details
    assert 0 < details.reasoning_tokens <= extra["thinking_token_budget"] or not whole.choices[0].message.reasoning
    deltas = [chunk.choices[0].delta for chunk in create(**fields, extra_body=extra, stream=True)]
    reasoning = "".join(getattr(delta, "reasoning", None) or "" for delta in deltas)
    assert reasoning == "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    content = "".join(delta.content or "" for delta in deltas)
    return whole.choices[0], reasoning, content or "".join(call.function.arguments or "" for call in calls)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_after_the_reasoning(server: ServerProcess, choice: Any) -> None:
    whole, reasoning, arguments = asked(server, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    (call,) = whole.message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
    assert whole.message.reasoning == reasoning and call.function.arguments == arguments
    assert reasoning and whole.message.content == "" and call.function.name == "answer"


def test_a_form_after_the_reasoning(server: ServerProcess) -> None:
    whole, reasoning, content = asked(server, extra_body={"structured_outputs": {"regex": "(17|71)!"}})
    assert re.fullmatch("(17|71)!", whole.message.content) and whole.finish_reason == "stop"
    assert (whole.message.reasoning, whole.message.content) == (reasoning, content) and reasoning


def test_no_budget_no_reasoning(server: ServerProcess) -> None:
    whole, reasoning, content = asked(
        server, extra_body={"thinking_token_budget": 0, "structured_outputs": {"regex": "(17|71)!"}}
    )
    assert not whole.message.reasoning and not reasoning and whole.message.content == content
    assert re.fullmatch("(17|71)!", content)
