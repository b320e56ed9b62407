"""Models, tokens, health, metrics, and what only administrators may do."""

import openai

import quire
from quire.config.server import ServerConfig
from tests.entrypoints.openai.running import MODEL, Running, running, stub_engine


def test_models(client: openai.OpenAI, server: Running) -> None:
    cards = client.models.list().data
    assert [card.id for card in cards] == [MODEL]
    assert client.models.retrieve(MODEL).model_dump()["max_model_len"] == server.engine.max_model_len


def test_several_names() -> None:
    with running(stub_engine(), ServerConfig(served_model_name=("a", "org/b"))) as server:
        client = server.client()
        assert [card.id for card in client.models.list().data] == ["a", "org/b"]
        assert client.models.retrieve("org/b").id == "org/b"
        assert client.completions.create(model="org/b", prompt="x", max_tokens=1).model == "org/b"
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).json()["model"] == "a"


def test_tokens_there_and_back(server: Running) -> None:
    answer = server.post("/tokenize", {"prompt": "Hello world", "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == server.engine.max_model_len
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "Hello world"}


def test_tokens_of_a_chat_are_those_it_is_answered_from(client: openai.OpenAI, server: Running) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    count = server.post("/tokenize", {"messages": messages}).json()["count"]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)  # type: ignore[arg-type]
    assert answer.usage is not None and answer.usage.prompt_tokens == count
    assert server.post("/tokenize", {"prompt": "a", "messages": messages}).status_code == 400
    assert server.post("/detokenize", {"tokens": [-1]}).status_code == 400


def test_health_and_version(server: Running) -> None:
    assert [server.get(path).status_code for path in ("/health", "/ready", "/ping")] == [200, 200, 200]
    assert server.post("/ping").status_code == 200
    assert server.get("/version").json() == {"version": quire.__version__}
    assert server.get("/load").json()["server_load"] == 0


def test_metrics(client: openai.OpenAI, server: Running) -> None:
    client.completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=2)
    server.get("/nowhere/at/all")
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.text.splitlines()
    types = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    assert "# TYPE quire:prompt_tokens_total counter" in lines
    assert "# TYPE quire:time_to_first_token_seconds histogram" in lines
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    name = server.engine.model_name
    assert int(values[f'quire:generation_tokens_total{{model_name="{name}"}}']) >= 2
    assert int(values['quire:http_requests_total{method="POST",handler="/v1/completions",status="200"}']) >= 1
    assert int(values['quire:http_requests_total{method="GET",handler="other",status="404"}']) >= 1
    assert float(values['quire:http_request_duration_seconds_bucket{handler="/v1/completions",le="+Inf"}']) >= 1


def test_administration_is_off_unless_asked_for(server: Running, slow: Running) -> None:
    assert server.post("/reset_prefix_cache").status_code == 404
    assert server.get("/server_info").status_code == 404
    assert slow.post("/reset_prefix_cache").json() == {"reset": True}
    assert slow.get("/server_info").json()["server"]["enable_admin"] is True


def test_an_administrator_ends_requests(slow: Running) -> None:
    stream = slow.client().completions.create(model=MODEL, prompt=[1], max_tokens=4000, stream=True)
    first = next(stream)
    assert slow.post("/abort_requests", {"request_ids": [first.id, "unknown"]}).json() == {"aborted": [first.id]}
    assert list(stream)[-1].choices[0].finish_reason == "abort"
    slow.wait_until(lambda: not slow.engine.running and not slow.server.context.jobs)


def test_secrets_are_not_shown() -> None:
    with running(stub_engine(), ServerConfig(enable_admin=True, api_key=("secret",))) as server:
        answer = server.get("/server_info", headers={"Authorization": "Bearer secret"})
        assert answer.status_code == 200 and "secret" not in answer.text


def test_the_openapi_document_lists_every_path_and_field(server: Running) -> None:
    document = server.get("/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/health", "/v1/models/{name}"} <= set(
        document["paths"]
    )
    assert "/abort_requests" not in document["paths"]  # administration is off
    chat = document["components"]["schemas"]["ChatRequest"]
    assert chat["required"] == ["messages"] and "cache_salt" in chat["properties"]
