"""Keys, CORS, rate limits, request ids, the access log."""

import logging
from typing import Any

import pytest
from starlette.middleware.base import RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.config.server import ServerConfig, load_api_keys
from quire.entrypoints.http.middleware import import_middleware
from tests.entrypoints.stub_server import MODEL, StubServer, stub_engine, stub_server

BODY: dict[str, Any] = {"model": MODEL, "prompt": [1, 2], "max_tokens": 3}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_keys() -> None:
    with stub_server(stub_engine(), api_keys=("first", "zweiter-schlüssel")) as server:
        for value in (None, "Bearer wrong", "Bearer", "first", "Basic first", "Bearer first second"):
            headers = {"Authorization": value} if value is not None else {}
            response = server.post("/v1/completions", BODY, headers=headers)
            assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["code"] == "invalid_api_key"
        for key in ("first", "zweiter-schlüssel"):
            headers = {"Authorization": f"Bearer {key}".encode()}  # type: ignore[dict-item]
            assert server.post("/v1/completions", BODY, headers=headers).status_code == 200
        for path in ("/health", "/ready", "/ping", "/metrics", "/version"):
            assert server.get(path).status_code == 200
        for path in ("/v1/models", "/load", "/openapi.json", "/nowhere", "/metrics/", "/v1/metrics"):
            assert server.get(path).status_code == 401


def test_the_paths_without_keys_are_configurable() -> None:
    with stub_server(stub_engine(), ServerConfig(open_paths="/load, /health"), api_keys=("k",)) as server:
        paths = ("/load", "/health", "/metrics", "/version", "/ping")
        assert [server.get(path).status_code for path in paths] == [200, 200, 401, 401, 401]
    with stub_server(stub_engine(), ServerConfig(open_paths=""), api_keys=("k",)) as server:
        assert server.get("/health").status_code == 401


def test_where_keys_come_from(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\none\n\ntwo\n")
    config = ServerConfig(api_key=("flag",), api_key_file=str(file))
    assert load_api_keys(config, {"QUIRE_API_KEY": "three, four"}) == ("flag", "one", "two", "three", "four")
    assert load_api_keys(ServerConfig(), {}) == ()
    assert load_api_keys(ServerConfig(), {"VLLM_API_KEY": "with,comma"}) == ("with,comma",)
    assert load_api_keys(ServerConfig(api_key=("flag",)), {"VLLM_API_KEY": "vllm"}) == ("flag",)


def test_a_key_file_that_others_can_read_is_reported(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text("one")
    for mode, said in ((0o600, False), (0o644, True)):
        file.chmod(mode)
        load_api_keys(ServerConfig(api_key_file=str(file)), {})
        assert ("chmod 600" in caplog.text) is said


def test_no_key_where_one_was_meant_fails_closed(tmp_path: Any) -> None:
    (tmp_path / "keys").write_text("# none\n")
    with pytest.raises(ValueError, match="holds no key"):
        load_api_keys(ServerConfig(api_key_file=str(tmp_path / "keys")), {})
    with pytest.raises(OSError):
        load_api_keys(ServerConfig(api_key_file=str(tmp_path / "missing")), {})
    with pytest.raises(ValueError, match="set but empty"):
        load_api_keys(ServerConfig(), {"QUIRE_API_KEY": " "})
    with pytest.raises(ValueError, match="VLLM_API_KEY is set but empty"):
        load_api_keys(ServerConfig(), {"VLLM_API_KEY": ""})
    with pytest.raises(ValueError, match="--api-key is empty"):
        load_api_keys(ServerConfig(api_key=("",)), {})


def test_requests_per_interval() -> None:
    config = ServerConfig(rate_limit_requests=2, rate_limit_interval=1000)
    with stub_server(stub_engine(), config, api_keys=("a", "b")) as server:
        codes = [server.post("/v1/completions", BODY, headers=bearer("a")).status_code for _ in range(3)]
        assert codes == [200, 200, 429]
        response = server.post("/v1/completions", BODY, headers=bearer("a"))
        assert 990 < int(response.headers["retry-after"]) <= 1000
        assert response.json()["error"]["code"] == "rate_limit_exceeded"
        assert server.post("/v1/completions", BODY, headers=bearer("b")).status_code == 200
        assert server.get("/health").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_per_interval(stream: bool) -> None:
    with stub_server(stub_engine(), ServerConfig(rate_limit_token=10, rate_limit_interval=1000)) as server:
        codes = [server.post("/v1/completions", BODY | {"stream": stream}).status_code for _ in range(3)]
        assert codes == [200, 200, 429]  # five tokens each


def test_cors() -> None:
    preflight = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
    with stub_server(stub_engine(), ServerConfig(allowed_origins=("http://page",)), api_keys=("k",)) as server:
        import httpx

        allowed = httpx.options(f"{server.url}/v1/completions", headers=preflight)
        assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == "http://page"
        refused = httpx.options(f"{server.url}/v1/completions", headers=preflight | {"Origin": "http://other"})
        assert "access-control-allow-origin" not in refused.headers
        # A page must be able to read why it was refused.
        denied = server.post("/v1/completions", BODY, headers={"Origin": "http://page"})
        assert denied.status_code == 401 and denied.headers["access-control-allow-origin"] == "http://page"


def test_cors_methods_headers_and_cookies_are_those_allowed() -> None:
    import httpx

    config = ServerConfig(
        allowed_origins=("http://page",),
        allowed_methods=("PUT",),
        allowed_headers=("X-Own",),
        allow_credentials=True,
    )
    asks = {"Origin": "http://page", "Access-Control-Request-Method": "PUT"}
    with stub_server(stub_engine(), config) as server:
        url = f"{server.url}/v1/completions"
        allowed = httpx.options(url, headers=asks | {"Access-Control-Request-Headers": "X-Own"})
        assert allowed.status_code == 200 and allowed.headers["access-control-allow-credentials"] == "true"
        assert "X-Own" in allowed.headers["access-control-allow-headers"]
        assert httpx.options(url, headers=asks | {"Access-Control-Request-Method": "POST"}).status_code == 400
        assert httpx.options(url, headers=asks | {"Access-Control-Request-Headers": "X-Other"}).status_code == 400


def test_no_cors_by_default(server: StubServer) -> None:
    assert "access-control-allow-origin" not in server.get("/health", headers={"Origin": "http://page"}).headers


def test_request_ids(server: StubServer) -> None:
    response = server.post("/v1/completions", BODY, headers={"X-Request-Id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1" and response.json()["id"] == "cmpl-mine-1"
    assert len(server.get("/nowhere").headers["x-request-id"]) == 32
    assert server.post("/v1/completions", BODY | {"request_id": "body"}).json()["id"] == "cmpl-body"
    assert server.get("/health", headers={"X-Request-Id": "x" * 500}).headers["x-request-id"] != "x" * 500


def test_an_id_in_use_gets_another(slow: StubServer) -> None:
    client = slow.client(default_headers={"X-Request-Id": "same"})
    with client.completions.create(model=MODEL, prompt=[1], max_tokens=4000, stream=True) as stream:
        assert next(iter(stream)).id == "cmpl-same"
        assert client.completions.create(model=MODEL, prompt=[1], max_tokens=1).id.startswith("cmpl-same-")


def access_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "quire.access"]


def test_the_access_log(caplog: pytest.LogCaptureFixture) -> None:
    config = ServerConfig(disable_access_log_for_endpoints="/health, /metrics")
    with caplog.at_level(logging.INFO, logger="quire"), stub_server(stub_engine(), config) as server:
        server.get("/health")
        server.get("/nowhere%0Aforged", headers={"X-Request-Id": "abc"})
        server.wait_until(lambda: server.server.context.http_metrics.in_progress == 0)
        (line,) = access_lines(caplog)
        assert '"GET /nowhere%0Aforged" 404' in line and line.endswith("abc")


def test_the_access_log_can_be_off(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, logger="quire"),
        stub_server(stub_engine(), ServerConfig(access_log=False)) as server,
    ):
        server.get("/nowhere")
        server.wait_until(lambda: server.server.context.http_metrics.in_progress == 0)
        assert not access_lines(caplog)


def test_behind_a_proxy() -> None:
    with stub_server(stub_engine(), ServerConfig(root_path="/llm"), api_keys=("k",)) as server:
        assert server.url.endswith("/llm")
        assert server.get("/health").status_code == 200  # the URL that is printed
        assert server.post("/v1/completions", BODY).status_code == 401
        assert server.post("/v1/completions", BODY, headers=bearer("k")).status_code == 200
        assert server.get("/llm/health", headers=bearer("k")).status_code == 404
        # A proxy may also strip its prefix.
        bare = StubServer(server.engine, server.server, server.url.removesuffix("/llm"), server.loop, server.thread)
        assert bare.get("/health").status_code == 200
        assert bare.post("/v1/completions", BODY).status_code == 401
        assert bare.post("/v1/completions", BODY, headers=bearer("k")).status_code == 200


def test_a_prefix_that_paths_begin_with_anyway() -> None:
    with stub_server(stub_engine(), ServerConfig(root_path="/v1"), api_keys=("k",)) as server:
        bare = StubServer(server.engine, server.server, server.url.removesuffix("/v1"), server.loop, server.thread)
        for path in ("/v1/models", "/v1/v1/models"):
            assert bare.get(path).status_code == 401
            assert bare.get(path, headers=bearer("k")).status_code == 200
        for path in ("/health", "/v1/health"):
            assert bare.get(path).status_code == 200


class Stamp:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def stamped(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-stamp", b"yes")]
            await send(message)

        await self.app(scope, receive, stamped)


async def mark(request: Request, call_next: RequestResponseEndpoint) -> Response:
    response = await call_next(request)
    response.headers["x-mark"] = "yes"
    return response


def test_custom_middleware() -> None:
    here = "tests.entrypoints.http.test_middleware"
    for path in (f"{here}:Stamp", f"{here}.Stamp"):
        with stub_server(stub_engine(), ServerConfig(middleware=(path, f"{here}.mark"))) as server:
            headers = server.get("/version").headers
            assert (headers["x-stamp"], headers["x-mark"]) == ("yes", "yes")
    for wrong in ("nowhere:Stamp", "json:Stamp", "json"):
        with pytest.raises(ValueError, match="--middleware"):
            import_middleware(wrong)
