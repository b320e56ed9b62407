"""Structured-output fields over HTTP: invalid ones on a stub, the others on a real engine."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from quire.config import EngineConfig
from quire.engine.async_llm import AsyncLLM
from quire.entrypoints.openai.protocol import CompletionRequest
from quire.entrypoints.openai.structured import structured_outputs
from tests.entrypoints.stub_server import StubServer, stub_server
from tests.structured_output.cases import TRIGGERED
from tests.structured_output.model import save_model

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
USER: Any = [{"role": "user", "content": "x"}]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubServer]:
    folder = save_model(Path(tmp_path_factory.mktemp("structured")))
    config = EngineConfig.from_kwargs(
        model=folder, dtype="float32", chat_template=TEMPLATE, num_gpu_blocks_override=200, max_num_seqs=8
    )
    engine = AsyncLLM(config)
    try:
        with stub_server(engine) as one:  # type: ignore[arg-type]
            yield one
    finally:
        engine.shutdown()


def chat(server: StubServer, **fields: Any) -> Any:
    fields = {"temperature": 1.5, "max_tokens": 150, "seed": 1} | fields
    return server.client().chat.completions.create(model="stub", messages=USER, **fields)


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


def test_a_json_schema(real: StubServer) -> None:
    extra = {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}
    assert isinstance(json.loads(chat(real, extra_body=extra).choices[0].message.content)["ok"], bool)
    response = chat(real, response_format=json_schema({"enum": ["a", 5]}))
    assert json.loads(response.choices[0].message.content) in ("a", 5)
    assert response.choices[0].finish_reason == "stop"


def test_a_stream_of_it(real: StubServer) -> None:
    chunks = list(chat(real, response_format=json_schema({"const": "fixed"}), stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == '"fixed"'


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[a-c]{5}"}, "[a-c]{5}"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"guided_json": {"enum": [1, 2]}, "guided_decoding_backend": "guidance"}, "[12]"),
        ({"guided_grammar": 'root ::= "x" [0-9]'}, "x[0-9]"),
        ({"structured_outputs": {"regex": "z{3}"}}, "zzz"),
        ({"response_format": {"type": "text"}, "guided_regex": "q"}, "q"),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "format": {
                        "type": "tag",
                        "begin": "<f>",
                        "content": {"type": "json_schema", "json_schema": {"enum": [1]}},
                        "end": "</f>",
                    },
                }
            },
            "<f>1</f>",
        ),
    ],
)
def test_vllms_fields(real: StubServer, fields: dict[str, Any], pattern: str) -> None:
    response = real.post("/v1/completions", {"prompt": "x", "temperature": 1.5, "max_tokens": 100, **fields}).json()
    assert re.fullmatch(pattern, response["choices"][0]["text"]), response


def test_the_former_form_of_structural_tags() -> None:
    tag = {"begin": "<f>", "schema": {"enum": [1]}, "end": "</f>"}
    former = {"type": "structural_tag", "structures": [tag], "triggers": ["<f"]}
    form = structured_outputs(CompletionRequest(prompt="x", response_format=former))
    assert form is not None and json.loads(form.structural_tag)["format"] == TRIGGERED


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("response_format", json_schema({"type": "strnig"}), "strnig"),
        ("response_format", json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        ("guided_regex", "(a", "cannot be enforced"),
        ("guided_grammar", "nonsense", "cannot be enforced"),
    ],
)
def test_what_cannot_be_compiled_is_a_400(real: StubServer, field: str, value: Any, reason: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match=reason) as error:
        chat(real, extra_body={field: value}, stream=stream)
    assert error.value.param == field


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": json_schema("{")}, "response_format"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_json": {"type": "object"}, "guided_decoding_backend": "yacc"}, "guided_json"),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs"),
        ({"structured_outputs": 7}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "field": "x"}}, "structured_outputs"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": "a", "allowed_token_ids": [1]}, "allowed_token_ids"),
    ],
)
def test_wrong_fields_never_reach_the_engine(server: StubServer, fields: dict[str, Any], param: str) -> None:
    response = server.post("/v1/chat/completions", {"messages": USER, **fields})
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text
