"""Hostile structured-output constraints over HTTP: each gets a response, others keep running, nothing leaks."""

import itertools
import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest

from tests.entrypoints.openai.hostile import CASES, SLOW, random_schema
from tests.entrypoints.server_process import SECONDS, ServerProcess, eventually, resident, server_process

GROWTH = 600 * 2**20 // 4096  # pages: libraries, their tables for the vocabulary, and the cache of grammars


class Bystander:
    """Another client's stream, without constraints."""

    def __init__(self, server: ServerProcess) -> None:
        self.url = server.url
        self.tokens = 0
        self.failures: list[str] = []
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 450, "stream": True, "ignore_eos": True}
        while not self.ended.is_set():
            with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=SECONDS) as response:
                for line in response.iter_lines():
                    if '"error"' in line:
                        self.failures.append(line)
                    self.tokens += bool(line)
                    if self.ended.is_set():
                        return


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    limits = ("--structured-outputs-compile-seconds", "3", "--structured-outputs-cache-bytes", str(1 << 26))
    with server_process(tmp_path_factory.mktemp("hostile"), "--num-gpu-blocks-override", "512", *limits) as one:
        yield one


@pytest.fixture(scope="module")
def bystander(server: ServerProcess) -> Iterator[Bystander]:
    one = Bystander(server)
    eventually(lambda: one.tokens > 0)
    yield one
    one.ended.set()
    one.thread.join(SECONDS)


def ask(server: ServerProcess, kind: str, value: Any, backend: str = "auto", max_tokens: int = 12) -> httpx.Response:
    form = {kind: value, "backend": backend}
    body = {"prompt": "x", "max_tokens": max_tokens, "temperature": 1, "seed": 1, "structured_outputs": form}
    return server.post("/v1/completions", body)


def check(response: httpx.Response) -> None:
    """A 400 names the problem; a 503 says that all compilers are busy, with Retry-After."""
    assert response.status_code in (200, 400, 503), response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["message"].startswith("structured_outputs: ")
    if response.status_code == 400:
        assert error["param"] == "structured_outputs" and "compilers" not in error["message"]
    if response.status_code == 503:
        assert "compiler" in error["message"] and int(response.headers["Retry-After"]) > 0


@pytest.mark.parametrize("name", CASES)
def test_each_gets_a_response_while_others_keep_running(server: ServerProcess, bystander: Bystander, name: str) -> None:
    before = bystander.tokens
    response = ask(server, *CASES[name])
    check(response)
    meanwhile = bystander.tokens - before
    if "more than 3 seconds" in response.text:
        assert meanwhile > 0, "the engine stood still while the grammar was compiled"
    assert server.get("/health").status_code == 200
    eventually(lambda: bystander.tokens > before)
    assert not bystander.failures


def test_random_schemas(server: ServerProcess, bystander: Bystander) -> None:
    """A finished response is valid under its schema."""
    fresh = itertools.count(5)
    eventually(lambda: ask(server, "regex", f"[ab]{{{next(fresh)}}}").status_code == 200)  # a compiler is free
    draw = random.Random(11)
    schemas = [random_schema(draw) for _ in range(40)]
    with ThreadPoolExecutor(8) as pool:
        responses = list(pool.map(lambda schema: ask(server, "json", schema, max_tokens=60), schemas))
    ended = 0
    for schema, response in zip(schemas, responses, strict=True):
        check(response)
        if response.status_code == 200 and response.json()["choices"][0]["finish_reason"] == "stop":
            jsonschema.validate(json.loads(response.json()["choices"][0]["text"]), schema)
            ended += 1
    assert ended > 5 and not bystander.failures


def test_slow_grammars_occupy_the_compilers_only_temporarily(server: ServerProcess, bystander: Bystander) -> None:
    kind, schema, backend = SLOW
    before = bystander.tokens
    slow = [schema | {"title": str(i)} for i in range(3)]
    with ThreadPoolExecutor(3) as pool:
        responses = list(pool.map(lambda one: ask(server, kind, one, backend), slow))
    for response in responses:
        check(response)
    assert bystander.tokens > before
    eventually(lambda: ask(server, "regex", "[ab]{3}").status_code == 200)


def test_nothing_leaks(server: ServerProcess, bystander: Bystander) -> None:
    engine = server.engine
    ask(server, "regex", "[ab]{4}")
    before = resident(engine)
    for name in ("an enum of 8000", "2000 properties", "a long pattern", "10000 alternatives"):
        check(ask(server, *CASES[name]))
    for i in range(6):  # a new grammar each time
        check(ask(server, "json", {"enum": [f"{i} value {j}" for j in range(4000)]}))
    bystander.ended.set()
    bystander.thread.join(SECONDS)

    def idle() -> bool:
        lines = [line for line in server.get("/metrics").text.splitlines() if "num_requests" in line and line[0] != "#"]
        return len(lines) >= 2 and all(line.endswith((" 0", " 0.0")) for line in lines)

    eventually(idle)
    assert resident(engine) - before < GROWTH
    assert server.process.poll() is None
