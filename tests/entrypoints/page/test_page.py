"""The page's server side: its files, who may watch, and what watchers get."""

import gzip
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from quire.config.server import ServerConfig
from quire.entrypoints.page.access import is_loopback
from quire.entrypoints.page.latencies import Latencies, quantile
from quire.entrypoints.page.recording import check_recording, recording_app
from quire.entrypoints.page.static_files import FOLDER, static_files
from quire.entrypoints.page.view_feed import encoded
from quire.metrics.kinds import Observations
from tests.entrypoints.stub_server import StubServer, refusal, stub_engine, stub_server

KEYS = {"Authorization": "Bearer secret"}
MAX_COMPRESSED = 300_000


def sample(server: StubServer, **kwargs: Any) -> dict[str, Any]:
    """The first event of the stream."""
    with httpx.stream("GET", f"{server.url}/view/stream", timeout=20, **kwargs) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        line = next(line for line in response.iter_lines() if line.startswith("data: "))
    return json.loads(line.removeprefix("data: "))


@pytest.fixture(scope="module")
def keyed() -> Iterator[StubServer]:
    with stub_server(stub_engine(), ServerConfig(enable_admin=True), ("secret",)) as one:
        yield one


# Files


def test_the_page_is_served_at_the_root(server: StubServer) -> None:
    response = server.get("/")
    assert response.headers["content-type"] == "text/html; charset=utf-8" and "<q-app>" in response.text


def test_every_file_has_a_strict_policy(server: StubServer) -> None:
    for file in static_files():
        response = server.get(file.path)
        policy = response.headers["content-security-policy"]
        assert response.status_code == 200 and "default-src 'none'" in policy and "unsafe" not in policy
        assert "require-trusted-types-for 'script'" in policy and "frame-ancestors 'none'" in policy
        assert response.headers["x-content-type-options"] == "nosniff"


def test_nothing_is_inline_and_nothing_comes_from_elsewhere() -> None:
    page = (FOLDER / "index.html").read_text("utf-8")
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", page)
    assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", page))
    for file in [*FOLDER.glob("*.js"), *FOLDER.glob("*.css"), FOLDER / "index.html"]:
        outside = [link for link in re.findall(r"https?://[^\s\"')]*", file.read_text("utf-8")) if "w3.org" not in link]
        assert not outside, (file.name, outside)


def test_files_are_small() -> None:
    compressed = sum(len(gzip.compress(file.content)) for file in static_files() if ".LICENSE" not in file.path)
    assert compressed < MAX_COMPRESSED


def test_vendored_code_has_its_licence() -> None:
    named = (FOLDER / "vendor" / "README.txt").read_text("utf-8")
    for file in (FOLDER / "vendor").iterdir():
        if file.suffix in (".js", ".css", ".woff2"):
            stem = re.sub(r"-\d.*", "", file.stem).lower()
            licence = FOLDER / "vendor" / f"{ {'purify': 'dompurify'}.get(stem, stem) }.LICENSE.txt"
            assert licence.exists(), file.name
            assert file.name in named or f"{stem}-*" in named


def test_files_are_compressed_and_revalidated(server: StubServer) -> None:
    first = server.get("/page/app.js", headers={"accept-encoding": "gzip"})
    assert first.headers["content-encoding"] == "gzip"
    plain = server.get("/page/app.js", headers={"accept-encoding": "identity"})
    assert (
        "content-encoding" not in plain.headers and plain.content == first.content == (FOLDER / "app.js").read_bytes()
    )
    again = server.get("/page/app.js", headers={"if-none-match": first.headers["etag"]})
    assert again.status_code == 304 and not again.content


@pytest.mark.parametrize(
    "path", ["/page/../routes.py", "/page/%2e%2e/routes.py", "/page/", "/page/vendor", "/page/x.js"]
)
def test_only_the_files_are_served(server: StubServer, path: str) -> None:
    assert server.get(path).status_code == 404


def test_files_need_no_key_and_calls_do(keyed: StubServer) -> None:
    assert keyed.get("/").status_code == 200 and keyed.get("/page/app.js").status_code == 200
    for path in ("/view/info", "/view/stream", "/v1/models"):
        assert refusal(keyed.get(path), 401)
    info = keyed.get("/view/info", headers=KEYS).json()
    assert info["view"] is True and info["keys"] is True


@pytest.mark.parametrize("config", [{"disable_page": True}, {"tokens_only": True}])
def test_without_the_page_its_paths_are_unknown(config: dict[str, Any]) -> None:
    with stub_server(stub_engine(), ServerConfig(**config)) as server:
        for path in ("/", "/page/app.js", "/view/info", "/view/stream"):
            assert server.get(path).status_code == 404
    with stub_server(stub_engine(), ServerConfig(**config), ("secret",)) as server:
        assert server.get("/").status_code == 401  # not even which paths exist


def test_the_page_is_served_below_a_prefix() -> None:
    with stub_server(stub_engine(), ServerConfig(root_path="/models/a")) as server:
        root = server.url.removesuffix("/models/a")
        for path in ("/models/a/", "/models/a/page/app.js", "/models/a/view/info"):
            assert httpx.get(root + path).status_code == 200


# The view


def test_the_stream_has_lengths_and_no_texts() -> None:
    with stub_server(stub_engine(step_seconds=0.01)) as server:
        words = "a very private question"
        body = {"model": "stub", "prompt": words, "max_tokens": 2000, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=20) as response:
            lines = response.iter_lines()
            next(lines)
            found = sample(server)
        assert len(found["running"]) == 1 and found["running"][0][1] > 0
        assert found["blocks"]["total"] == 1 and found["latency"]["first_token"][3] >= 0
        assert not any(word in json.dumps(found) for word in ("private", "question", "two three"))


def test_the_core_is_asked_only_while_somebody_watches() -> None:
    engine = stub_engine()
    calls: list[int] = []
    answer = engine.get_view

    async def get_view(since: int, cursor: Sequence[int]) -> dict[str, Any]:
        calls.append(since)
        return await answer(since, cursor)

    engine.get_view = get_view  # type: ignore[method-assign]
    with stub_server(engine) as server:
        server.get("/view/info")
        assert not calls
        sample(server)
        assert calls
        (stream,) = [route for route in server.server.config.app.routes if route.path == "/view/stream"]
        feed = stream.endpoint.__self__.feed
        server.wait_until(lambda: feed._task.done() and not feed._watchers)


def test_watchers_learn_that_the_engine_died() -> None:
    engine = stub_engine()
    with stub_server(engine) as server, httpx.stream("GET", f"{server.url}/view/stream", timeout=20) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        engine.dead = "it was killed"
        rest = list(lines)
    assert "event: end" in rest and "the engine has died" in rest[rest.index("event: end") + 1]
    assert "killed" not in "".join(rest)


@pytest.mark.parametrize("name", ["X-Forwarded-For", "Forwarded", "Via", "X-Real-IP", "X-Forwarded-Host"])
def test_through_a_proxy_the_view_is_off(server: StubServer, name: str) -> None:
    headers = {name: "10.0.0.1"}
    assert server.get("/view/info", headers=headers).json()["view"] is False
    assert "--enable-admin" in refusal(server.get("/view/stream", headers=headers), 403)


def test_other_sites_and_names_cannot_watch(server: StubServer) -> None:
    assert refusal(server.get("/view/stream", headers={"Host": "evil.example"}), 403)
    assert refusal(server.get("/view/stream", headers={"Sec-Fetch-Site": "cross-site"}), 403)
    assert server.get("/view/info", headers={"Sec-Fetch-Site": "same-origin"}).json()["view"] is True


def test_on_a_public_address_without_keys_the_view_is_off() -> None:
    for admin in (False, True):
        with stub_server(stub_engine(), ServerConfig(host="0.0.0.0", enable_admin=admin)) as server:
            info = server.get("/view/info").json()
            assert info["open_to_network"] and not info["view"] and "--api-key" in info["view_refused"]
            assert refusal(server.get("/view/stream"), 403)


def test_on_a_public_address_with_keys_it_needs_the_flag() -> None:
    with stub_server(stub_engine(), ServerConfig(host="0.0.0.0"), ("secret",)) as server:
        info = server.get("/view/info", headers=KEYS).json()
        assert not info["open_to_network"] and not info["view"] and "--enable-admin" in info["view_refused"]
    with stub_server(stub_engine(), ServerConfig(host="0.0.0.0", enable_admin=True), ("secret",)) as server:
        assert sample(server, headers=KEYS | {"X-Forwarded-For": "10.0.0.1"})["running"] == []


def test_addresses_of_this_machine() -> None:
    assert all(is_loopback(host) for host in ("localhost", "127.0.0.1", "127.1.2.3", "::1", "[::1]"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "10.0.0.1", "localhost.evil.example", "", "::"))


def test_block_states_are_runs_or_bytes() -> None:
    assert encoded(b"") in ("", [])
    assert encoded(bytes([8] * 100 + [13] * 5)) == [8, 100, 13, 5]
    assert encoded(bytes(range(16))) == "AAECAwQFBgcICQoLDA0ODw=="


# Latencies


def test_percentiles_are_those_of_the_last_minute() -> None:
    seen, latencies = Observations((0.1, 0.2, 0.4)), Latencies()
    seen.add(0.05, 100)
    name = "quire:time_to_first_token_seconds"
    latencies.percentiles(0.0, [seen.histogram(name, {})])
    seen.add(0.3, 10)
    found = latencies.percentiles(30.0, [seen.histogram(name, {})])["first_token"]
    assert found[0] == pytest.approx(0.3) and found[3] == 10
    assert latencies.percentiles(120.0, [seen.histogram(name, {})])["first_token"] == [None, None, None, 0]


def test_a_quantile_lies_in_its_bucket() -> None:
    bounds, inf = [1.0, 2.0], float("inf")
    assert quantile([*bounds, inf], [0, 10, 10], 0.5) == pytest.approx(1.5)
    assert quantile([*bounds, inf], [0, 0, 10], 0.5) == 2.0  # all above: its lower bound
    assert quantile([*bounds, inf], [0, 0, 0], 0.5) is None


# Recordings

RECORDING = {"format": "quire-view", "version": 1, "samples": [{"time": 1}], "server": {"models": ["a"]}}


def test_a_recording_is_played_without_an_engine() -> None:
    data = gzip.compress(json.dumps(RECORDING).encode())
    with TestClient(recording_app(data)) as client:
        info = client.get("/view/info").json()
        assert info["replay"] and info["models"] == ["a"]
        assert client.get("/view/recording").content == data and "<q-app>" in client.get("/").text


@pytest.mark.parametrize(
    "wrong", [b"", b"hello", b"{}", b"\x1f\x8bnot gzip", b'{"format": "other", "version": 1, "samples": [{}]}']
)
def test_other_files_are_refused(wrong: bytes) -> None:
    with pytest.raises(ValueError, match=r"x\.json is not a recording of the live view"):
        check_recording(wrong, "x.json")


def test_the_recording_of_the_docs_can_be_played() -> None:
    file = FOLDER.parents[3] / "docs" / "page" / "sample.json.gz"
    found = check_recording(file.read_bytes(), file.name)
    assert len(found.samples) > 50 and max(len(sample["running"]) for sample in found.samples) > 8


# The wheel


@pytest.mark.slow
def test_the_wheel_has_the_page(tmp_path: Path) -> None:
    root = FOLDER.parents[3]
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, root]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"quire/{file.file.relative_to(root / 'quire').as_posix()}" for file in static_files()}
    assert expected <= names
