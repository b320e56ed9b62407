"""schemathesis against the server's own OpenAPI document: no request causes a 500, and every response
matches the document."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.config.server import ServerConfig
from tests.entrypoints.stub_server import MODEL, stub_engine, stub_server

COMMAND = Path(sys.executable).parent / "schemathesis"
# Rules between fields (top_logprobs needs logprobs) cannot be expressed in a schema, so valid bodies may be refused;
# strings that spell numbers are accepted for them, which the schema does not say.
CHECKS = ["--checks", "all", "--exclude-checks", "positive_data_acceptance,negative_data_rejection"]
BOUNDS = ["--max-examples", "40", "--seed", "1", "--request-timeout", "30", "--phases", "examples,coverage,fuzzing"]
OUTPUT = ["--no-shrink", "--generation-database", "none", "--warnings", "off", "--continue-on-failure"]


@pytest.mark.slow
def test_no_request_makes_the_server_fail(tmp_path: Path) -> None:
    with stub_server(stub_engine(), ServerConfig(enable_admin=True, access_log=False)) as server:
        command = [str(COMMAND), "run", f"{server.url}/openapi.json", *CHECKS, *BOUNDS, *OUTPUT]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr
        metrics = server.get("/metrics").text
        # It tested something: every endpoint with a body accepted some and refused some.
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/abort_requests"):
            for status in (200, 400):
                assert f'handler="{path}",status="{status}"' in metrics
        assert 'status="500"' not in metrics
        server.wait_until(lambda: not server.engine.running and not server.server.context.jobs)


def test_the_document_names_fields_limits_and_statuses() -> None:
    config = ServerConfig(max_n=7, max_stop=3, api_key=("secret",))
    with stub_server(stub_engine(), config) as server:
        document = server.get("/openapi.json", headers={"Authorization": "Bearer secret"}).json()
    completions = document["paths"]["/v1/completions"]["post"]
    assert set(completions["responses"]) == {
        "200",
        "400",
        "401",
        "404",
        "408",
        "413",
        "415",
        "429",
        "500",
        "503",
        "504",
    }
    assert completions["security"] == [{"key": []}]
    assert set(completions["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    body = resolve(document, completions["requestBody"]["content"]["application/json"]["schema"])
    assert "prompt" in body["properties"] and not body["required"]  # or prompt_embeds
    fields = body["properties"]
    assert {"type": "integer", "minimum": 1, "maximum": 7} in fields["n"]["anyOf"]
    assert {"type": "string", "enum": [MODEL]} in fields["model"]["anyOf"]
    assert any(choice.get("maxItems") == 3 for choice in fields["stop"]["anyOf"])
    response = resolve(document, completions["responses"]["200"]["content"]["application/json"]["schema"])
    assert {"id", "choices", "usage"} <= set(response["required"])
    assert "security" not in document["paths"]["/health"]["get"]


def resolve(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    return document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": {}, "text": "x"}]},
        {"role": "user", "content": [{"type": ["text"], "text": "x"}]},
        {"role": "assistant", "content": None, "tool_calls": 5},
        {"role": "assistant", "content": "x", "tool_calls": {"id": 1}},
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_parts_of_a_wrong_type_are_the_clients_mistake(path: str, message: dict[str, Any]) -> None:
    with stub_server(stub_engine()) as server:
        response = server.post(path, {"messages": [message]})
    assert response.status_code == 400 and response.json()["error"]["param"] == "messages"
