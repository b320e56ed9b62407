"""While a body is being refused, other requests are served."""

from collections.abc import Iterator

import pytest

from tests.entrypoints.http.attacks import ATTACKS, send, watched
from tests.entrypoints.server_process import ServerProcess, eventually, server_process

BLOCKED = 10.0  # seconds, on a machine that runs other tests in parallel; the worst of these once took 45


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("blocking")
    with server_process(folder, "--max-model-len", "8192", "--enable-admin", "--disable-log-stats") as one:
        yield one


def idle(server: ServerProcess) -> bool:
    state = server.get("/server_info").json()["state"]
    return not any(state["front_end"][name] for name in ("requests", "streams")) and not state["core"]["requests"]


@pytest.mark.parametrize("name", ATTACKS)
def test_health_responds_meanwhile(server: ServerProcess, name: str) -> None:
    with watched(server) as watch:
        status = send(server, name)
    assert status in (200, 400), status
    assert max(watch.seconds, default=0.0) < BLOCKED
    assert idle(server)


def test_a_client_that_disconnects_from_a_thousand_sequences(server: ServerProcess) -> None:
    with watched(server) as watch:
        assert send(server, "8 prompts x n 128", leave_after=0.05) in (None, 200)
        eventually(lambda: idle(server))
    assert max(watch.seconds, default=0.0) < BLOCKED
