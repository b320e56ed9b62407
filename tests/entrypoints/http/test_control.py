"""Pause, sleep, new weights and calls of workers over HTTP, with a real server and keys."""

import threading
from typing import Any

import pytest

from quire.config.server import ServerConfig
from quire.entrypoints.http import control
from tests.entrypoints.server_process import ServerProcess, server_process
from tests.entrypoints.stub_server import stub_engine, stub_server
from tests.weights.models import two_models

KEY = {"Authorization": "Bearer secret"}
FLAGS = ("--dtype", "float32", "--skip-tokenizer-init", "--kv-cache-memory-bytes", str(1 << 24), "--cpu-threads", "1")
PATHS = ("/pause", "/resume", "/sleep", "/wake_up", "/start_weight_update", "/update_weights", "/collective_rpc")
PROMPT = list(range(1, 30))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    old, _ = two_models("llama")
    folder = tmp_path_factory.mktemp("server")
    flags = (*FLAGS, "--enable-sleep-mode", "--enable-admin", "--api-key", "secret")
    with server_process(folder, "--model", old, *flags) as started:
        yield started


def post(server: ServerProcess, path: str, body: Any = None) -> Any:
    response = server.post(path, body, headers=KEY)
    assert response.status_code == 200, response.text
    return response.json()


def get(server: ServerProcess, path: str) -> Any:
    return server.get(path, headers=KEY).json()


def tokens(server: ServerProcess, count: int = 12) -> list[int]:
    params = {"temperature": 0, "max_tokens": count, "ignore_eos": True}
    found = post(server, "/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": params})
    return list(found["choices"][0]["token_ids"])


def test_every_route_needs_the_key(server: ServerProcess) -> None:
    assert {server.post(path).status_code for path in PATHS} == {401}


def test_a_page_of_another_site_changes_nothing(server: ServerProcess) -> None:
    response = server.post("/pause", headers={**KEY, "Sec-Fetch-Site": "cross-site"})
    assert response.status_code == 403 and not get(server, "/is_paused")["is_paused"]


def test_sleep_and_wake(server: ServerProcess) -> None:
    before = tokens(server)
    assert post(server, "/sleep?level=1") == {"status": "sleeping", "level": 1}
    assert get(server, "/is_sleeping") == {"is_sleeping": True}
    found: list[list[int]] = []
    waiting = threading.Thread(target=lambda: found.append(tokens(server)))  # until the engine wakes
    waiting.start()
    assert post(server, "/wake_up?tags=weights") == {"status": "sleeping", "tags": ["weights"]}
    assert not found
    assert post(server, "/wake_up") == {"status": "awake", "tags": None}
    waiting.join()
    assert found == [before] and get(server, "/is_sleeping") == {"is_sleeping": False}
    assert post(server, "/pause?mode=wait") == {"status": "paused"}
    assert post(server, "/release_kv_cache_memory") == {"status": "kv_cache_released"}
    assert 'sleep_state="awake"} 1' in server.get("/metrics", headers=KEY).text
    post(server, "/wake_up?tags=kv_cache")
    assert tokens(server) == before


def test_pause_and_resume(server: ServerProcess) -> None:
    assert get(server, "/is_paused") == {"is_paused": False}
    assert post(server, "/pause?mode=keep&clear_cache=false") == {"status": "paused"}
    assert get(server, "/is_paused") == {"is_paused": True}
    assert post(server, "/resume") == {"status": "resumed"}
    assert get(server, "/is_paused") == {"is_paused": False}


def test_new_weights(server: ServerProcess) -> None:
    old, new = two_models("llama")
    before = tokens(server)
    assert get(server, "/weight_info") == {"weight_version": "default"}
    post(server, "/start_weight_update")
    assert post(server, "/update_weights", {"update_info": {"path": new}}) == {"message": "Weights updated"}
    assert post(server, "/finish_weight_update", {"weight_version": "7"}) == {"message": "Weight update finished"}
    after = tokens(server)
    assert after != before and get(server, "/weight_info") == {"weight_version": "7"}
    post(server, "/start_weight_update")
    post(server, "/update_weights", {"update_info": {"path": old}})
    post(server, "/finish_weight_update")  # without a body
    assert tokens(server) == before
    assert post(server, "/update_weight_version", {"new_version": "8"}) == {"success": True, "new_version": "8"}
    assert get(server, "/weight_info") == {"weight_version": "8"}


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("/sleep?level=5", None, "level is '5'; allowed: 0, 1, 2"),
        ("/sleep?mode=now", None, "allowed: abort, wait, keep"),
        ("/wake_up?tags=all", None, "allowed: weights, kv_cache, scheduling"),
        ("/pause?clear_cache=maybe", None, "clear_cache is 'maybe'"),
        ("/release_kv_cache_memory", None, "pause it first"),
        ("/update_weights", {"update_info": {"path": "/x"}}, "no update of weights has been started"),
        ("/update_weights", {"update": 1}, "update_info"),
        ("/finish_weight_update", {}, "no update of weights has been started"),
        ("/init_weight_transfer_engine", {"init_info": {}}, "--weight-transfer-config"),
        ("/start_draft_weight_update", None, "not available yet"),
        ("/collective_rpc", {"method": "_make_proposer"}, "must be a public method of workers"),
        ("/collective_rpc", {"method": "no_such"}, "workers have no method no_such"),
        ("/collective_rpc", {}, "method"),
        ("/collective_rpc", {"method": "describe", "args": [2**70]}, "can't serialize ints"),
    ],
)
def test_wrong_requests_say_what_is_allowed(server: ServerProcess, path: str, body: Any, why: str) -> None:
    response = server.post(path, body, headers=KEY)
    assert response.status_code == 400 and why in response.json()["error"]["message"], response.text


def test_methods_of_workers(server: ServerProcess) -> None:
    (described,) = post(server, "/collective_rpc", {"method": "describe"})["results"]
    assert "float32" in described


def test_without_keys_a_server_that_others_can_reach_is_not_changed() -> None:
    engine = stub_engine()
    with stub_server(engine, ServerConfig(host="0.0.0.0", enable_admin=True)) as open_server:
        for path in control.POST:
            response = open_server.post(path)
            assert response.status_code == 403 and "--api-key" in response.text, path
    with stub_server(engine, ServerConfig(host="127.0.0.1", enable_admin=True)) as own:
        assert own.post("/pause?mode=never").status_code == 400  # it is read
