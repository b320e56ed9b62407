"""Operators' endpoints: health, metrics, load, and those of --enable-admin."""

import openai

import quire
from quire.config.server import ServerConfig
from tests.entrypoints.stub_server import MODEL, StubServer, stub_engine, stub_server


def test_health_and_version(server: StubServer) -> None:
    assert [server.get(path).status_code for path in ("/health", "/ready", "/ping")] == [200, 200, 200]
    assert server.post("/ping").status_code == 200
    assert server.get("/version").json() == {"version": quire.__version__}
    assert server.get("/load").json()["server_load"] == 0


def test_metrics(client: openai.OpenAI, server: StubServer) -> None:
    client.completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=2)
    server.get("/nowhere/at/all")
    response = server.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = response.text.splitlines()
    types = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    assert "# TYPE quire:prompt_tokens_total counter" in lines
    assert "# TYPE quire:time_to_first_token_seconds histogram" in lines
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert int(values[f'quire:generation_tokens_total{{model_name="{MODEL}",engine="0"}}']) >= 2
    assert int(values['quire:http_requests_total{method="POST",handler="/v1/completions",status="200"}']) >= 1
    assert int(values['quire:http_requests_total{method="GET",handler="other",status="404"}']) >= 1
    assert float(values['quire:http_request_duration_seconds_bucket{handler="/v1/completions",le="+Inf"}']) >= 1


def test_admin_endpoints_are_off_by_default(server: StubServer, slow: StubServer) -> None:
    assert server.post("/reset_prefix_cache").status_code == 404
    assert server.get("/server_info").status_code == 404
    assert slow.post("/reset_prefix_cache").json() == {"reset": True}
    assert slow.get("/server_info").json()["server"]["enable_admin"] is True


def test_an_administrator_aborts_requests(slow: StubServer) -> None:
    stream = slow.client().completions.create(model=MODEL, prompt=[1], max_tokens=4000, stream=True)
    first = next(stream)
    assert slow.post("/abort_requests", {"request_ids": [first.id, "unknown"]}).json() == {"aborted": [first.id]}
    assert list(stream)[-1].choices[0].finish_reason == "abort"
    slow.wait_until(lambda: not slow.engine.running and not slow.server.context.jobs)


def test_secrets_are_not_shown() -> None:
    with stub_server(stub_engine(), ServerConfig(enable_admin=True, api_key=("secret",))) as server:
        response = server.get("/server_info", headers={"Authorization": "Bearer secret"})
        assert response.status_code == 200 and "secret" not in response.text
