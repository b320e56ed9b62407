"""Which requests are admitted: body limits, the waiting queue, rate limits; and the isolation of clients."""

from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from quire.config.server import ServerConfig
from quire.engine.input_processor import InputProcessor, ParsedPrompt
from quire.entrypoints.http.context import ServerContext
from quire.entrypoints.http.errors import ApiError
from quire.messages.requests import SchedulerStats
from tests.entrypoints.stub_server import refusal, stub_engine, stub_server


def test_only_a_few_unknown_names_get_a_hint(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": [1], "max_tokens": 1, **{f"temperatur{i}": 1 for i in range(400)}}
    with stub_server(stub_engine()) as server:
        assert server.post("/v1/completions", body).status_code == 200
    assert 0 < caplog.text.count("did you mean 'temperature'") < 10


def test_bodies_in_flight_have_a_total_limit() -> None:
    with stub_server(stub_engine(), ServerConfig(max_request_bytes_in_all=50_000)) as server:
        assert server.post("/v1/completions", {"prompt": [1], "user": "x" * 40_000, "max_tokens": 1}).status_code == 200
        response = server.post("/v1/completions", {"prompt": "x" * 60_000})
        assert "--max-request-bytes-in-all" in refusal(response, 503) and "retry-after" in response.headers
        assert server.post("/v1/completions", {"prompt": [1], "user": "x" * 40_000, "max_tokens": 1}).status_code == 200


def test_sequences_count_in_admission() -> None:
    engine = stub_engine(0.01)
    engine.max_num_seqs = 4
    many = {"prompt": [[1]] * 3, "n": 2, "max_tokens": 1}
    with stub_server(engine, ServerConfig(max_waiting_requests=2)) as server:
        assert server.post("/v1/completions", many).status_code == 200  # 4 run, 2 wait
        message = refusal(server.post("/v1/completions", many | {"n": 3}))
        assert "9 sequences; 4 can run and 2 may wait (--max-num-seqs, --max-waiting-requests)" in message
        long = {"prompt": [1], "n": 3, "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=long, timeout=20):
            assert "--max-waiting-requests" in refusal(server.post("/v1/completions", many), 503)
            assert server.post("/v1/completions", many | {"prompt": [1]}).status_code == 200


@pytest.mark.parametrize("limit", [0, 1, 2, 5])
def test_the_waiting_limit_is_exact(limit: int) -> None:
    engine = stub_engine()
    engine.max_num_seqs = 3
    context = ServerContext(engine, ServerConfig(max_waiting_requests=limit), engine.config)
    with ExitStack() as jobs:
        for _ in range(3 + limit):
            context.admit()
            jobs.enter_context(context.job("cmpl-", None, 1, 1))
        with pytest.raises(ApiError, match=f"{limit} requests are waiting already"):
            context.admit()
    context.admit(3 + limit)
    with pytest.raises(ApiError, match="3 can run"):
        context.admit(4 + limit)


def test_requests_waiting_in_the_engine_count() -> None:
    engine = stub_engine()
    context = ServerContext(engine, ServerConfig(max_waiting_requests=2), engine.config)
    with context.job("cmpl-", None, 1, 1):
        engine.stats = SchedulerStats(num_waiting=2)
        context.admit()
        engine.stats = SchedulerStats(num_waiting=3)
        with pytest.raises(ApiError, match="3 requests are waiting already"):
            context.admit()


def test_sequences_count_in_the_rate_limit() -> None:
    body = {"prompt": [[1]] * 2, "n": 2, "max_tokens": 1}
    with stub_server(stub_engine(), ServerConfig(rate_limit_requests=6, rate_limit_interval=3600)) as server:
        assert server.post("/v1/completions", body).status_code == 200
        message = refusal(server.post("/v1/completions", body), 429)
        assert "the limit is 6" in message


@pytest.mark.parametrize(
    ("keys", "isolation", "shared"),
    [(("a", "b"), None, False), (("a", "b"), "none", True), (("a",), None, True), (("a", "b"), "key", False)],
)
def test_prefixes_are_shared_within_a_key(
    monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...], isolation: str | None, shared: bool
) -> None:
    salts: list[str | None] = []
    before = InputProcessor.process

    def noting(self: InputProcessor, request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        salts.append(prompt.cache_salt)
        return before(self, request_id, prompt, *args, **kwargs)

    monkeypatch.setattr(InputProcessor, "process", noting)
    with stub_server(stub_engine(), ServerConfig(prefix_cache_isolation=isolation), keys) as server:
        for key in (keys[0], keys[-1]):
            for salt in (None, "mine"):
                body = {"prompt": [1], "max_tokens": 1, "cache_salt": salt}
                response = server.post("/v1/completions", body, headers={"Authorization": f"Bearer {key}"})
                assert response.status_code == 200
    assert (salts[:2] == salts[2:]) is shared and salts[0] != salts[1]
    assert all("Bearer" not in str(salt) and key not in str(salt).split() for salt in salts for key in keys)


def test_ids_of_requests_do_not_collide() -> None:
    """`x` with two prompts and `x-0` with one are three requests of the engine."""
    with stub_server(stub_engine(0.01)) as server:
        long = {"prompt": [[1], [2]], "max_tokens": 1000, "ignore_eos": True, "stream": True, "request_id": "x"}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=long, timeout=20) as stream:
            assert stream.status_code == 200
            for name in ("x-0", "x-1", "x"):
                body = {"prompt": [1], "max_tokens": 1, "request_id": name}
                assert server.post("/v1/completions", body).status_code == 200


def test_every_limit_counts_its_rejections() -> None:
    engine = stub_engine()
    engine.config.scheduler.max_num_queued_reqs, engine.config.scheduler.max_num_queued_tokens = 1, 4
    context = ServerContext(engine, ServerConfig(max_waiting_requests=0), engine.config)
    prompts = [ParsedPrompt(None, [1, 2, 3])]
    with context.job("cmpl-", None, 1, 1) as first:
        context.admit_tokens(first, prompts)
        with pytest.raises(ApiError, match="--max-num-queued-reqs 1"):
            context.admit()
        with context.job("cmpl-", None, 1, 1) as second, pytest.raises(ApiError, match="--max-num-queued-tokens 4"):
            context.admit_tokens(second, prompts)
        engine.config.scheduler.max_num_queued_reqs, engine.max_num_seqs = None, 1
        with pytest.raises(ApiError, match="--max-waiting-requests 0"):
            context.admit()
    assert context.http_metrics.rejections == 3
