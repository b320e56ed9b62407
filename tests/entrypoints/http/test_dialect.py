"""A plugin's dialect, served beside OpenAI's."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire import plugins
from quire.config.server import ServerConfig
from quire.entrypoints.http import dialect
from quire.entrypoints.http.context import ServerContext
from quire.entrypoints.http.dialect import Dialect, register_dialect
from quire.entrypoints.http.errors import ApiError, bad_request, json_response
from quire.entrypoints.http.server import announce
from tests.entrypoints.stub_server import StubServer, stub_engine, stub_server


def error_body(error: ApiError) -> bytes:
    return msgspec.json.encode({"type": "error", "said": error.message})


def routes(context: ServerContext) -> list[Route]:
    async def show(request: Request) -> Response:
        if request.path_params["number"] == 13:
            raise bad_request("number is 13; it must be another")
        return json_response({"number": request.path_params["number"], "model": context.model_names[0]})

    return [Route("/v1/own/{number:int}", show, methods=["GET"])]


OWN = Dialect("own", routes, error_body, prefixes=("/v1/own",), example=lambda url, name: f"own {url} {name}")


class Plugin:
    """As importlib.metadata gives it."""

    name, value = "own-dialect", "own:register"

    def __init__(self) -> None:
        self.num_calls = 0

    def load(self) -> Any:
        def register() -> None:
            self.num_calls += 1
            register_dialect(OWN)

        return register


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Plugin]:
    plugin = Plugin()
    monkeypatch.setattr(plugins, "entry_points", lambda group: [plugin])
    monkeypatch.setattr(dialect, "_registered", {})
    plugins.load_plugins.cache_clear()
    yield plugin
    plugins.load_plugins.cache_clear()


@pytest.fixture
def server(plugin: Plugin) -> Iterator[StubServer]:
    with stub_server(stub_engine(), ServerConfig(), api_keys=("key",)) as server:
        yield server


KEY = {"Authorization": "Bearer key"}


def test_a_plugin_s_routes_are_served(server: StubServer) -> None:
    assert server.get("/v1/own/7", headers=KEY).json() == {"number": 7, "model": "stub"}
    assert server.get("/v1/models", headers=KEY).status_code == 200
    assert "/v1/own/{number}" in server.get("/openapi.json", headers=KEY).json()["paths"]


def test_errors_under_its_prefix_have_its_schema(server: StubServer) -> None:
    own = {
        401: server.get("/v1/own/7"),
        400: server.get("/v1/own/13", headers=KEY),
        404: server.get("/v1/own/nowhere/at-all", headers=KEY),
        405: server.post("/v1/own/7", headers=KEY),
    }
    for status, response in own.items():
        assert response.status_code == status and response.json().keys() == {"type", "said"}
    assert own[405].headers["allow"] == "GET, HEAD" or own[405].headers["allow"] == "HEAD, GET"
    for path, status in (("/v1/ownership", 404), ("/v1/models/unknown", 404), ("/nowhere", 404)):
        response = server.get(path, headers=KEY)
        assert response.status_code == status and response.json().keys() == {"error"}


def test_routes_with_parameters_are_counted_by_their_pattern(server: StubServer) -> None:
    for number in (1, 2, 13):
        server.get(f"/v1/own/{number}", headers=KEY)
    server.get("/v1/models/stub", headers=KEY)
    text = server.get("/metrics", headers=KEY).text
    assert 'quire:http_requests_total{method="GET",handler="/v1/own/{number}",status="200"} 2' in text
    assert 'quire:http_requests_total{method="GET",handler="/v1/own/{number}",status="400"} 1' in text
    assert 'quire:http_requests_total{method="GET",handler="/v1/models/{name}",status="200"} 1' in text
    assert 'handler="other"' not in text


def test_plugins_are_loaded_once(plugin: Plugin) -> None:
    names = ["openai", "responses", "anthropic", "pooling", "page", "own"]
    for _ in range(2):
        assert [each.name for each in dialect.dialects()] == names
    assert plugin.num_calls == 1


def test_examples_are_announced(plugin: Plugin, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "quire"):
        announce("http://here:1", "small", "tool calls: json, reasoning: none")
    said = caplog.text
    assert "tool calls: json, reasoning: none" in said
    assert "serving small at http://here:1" in said and "try: own http://here:1 small" in said
    assert "try: curl http://here:1/v1/chat/completions" in said


@pytest.mark.parametrize(
    ("task", "path"), [("embed", "/v1/embeddings"), ("classify", "/classify"), ("token_classify", "/pooling")]
)
def test_the_example_is_what_the_model_can_do(caplog: pytest.LogCaptureFixture, task: str, path: str) -> None:
    with caplog.at_level("INFO", "quire"):
        announce("http://here:1", "small", f"pooling: {task}", task=task)
    (tried,) = (record.message for record in caplog.records if record.message.startswith("try: "))
    assert tried.startswith(f"try: curl http://here:1{path} ")
