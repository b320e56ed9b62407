"""One server with one or several API processes: real processes, the official client, raw sockets."""

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from quire import LLM, SamplingParams
from tests.entrypoints.server_process import SECONDS, ServerProcess, eventually, server_process, stopped

MODEL = "tiny"
BLOCKS = 600
FLAGS = ("--dtype", "float32", "--num-gpu-blocks-override", str(BLOCKS), "--served-model-name", MODEL, "--enable-admin")
PROMPTS = [f"Question {i}: what is {i} plus {i}? Answer:" for i in range(8)]
GREEDY: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}
LONG: dict[str, Any] = GREEDY | {"prompt": "Once", "max_tokens": 400}


@pytest.fixture(scope="module", params=["1", "2"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    with server_process(folder, "--api-server-count", request.param, *FLAGS) as one:
        yield one


@pytest.fixture(scope="module")
def expected() -> list[str]:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(dtype="float32", max_model_len=512, num_gpu_blocks_override=BLOCKS) as llm:
        return [output.outputs[0].text for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def state(server: ServerProcess) -> dict[str, int]:
    return server.get("/server_info").json()["state"]["core"]


def idle(server: ServerProcess) -> bool:
    """Nothing runs, and all blocks are free."""
    now, load = state(server), server.get("/load").json()
    return not now["requests"] and now["blocks_free"] == now["blocks"] and not load["server_load"]


def metric(server: ServerProcess, name: str) -> float:
    lines = server.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"quire:{name}{{"))


def send(server: ServerProcess, head: bytes, body: bytes = b"") -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(60)
    sock.connect(server.address)
    sock.sendall(head + body)
    return sock


def completion(body: bytes) -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)


def test_greedy_texts_equal_the_offline_ones(server: ServerProcess, expected: list[str]) -> None:
    async def texts() -> list[str]:
        url = f"{server.url}/v1"

        async def streamed(prompt: str) -> str:
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
                stream = await client.completions.create(prompt=prompt, stream=True, **GREEDY)
                return "".join([chunk.choices[0].text async for chunk in stream])

        async def whole(prompt: str) -> str:
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
                return (await client.completions.create(prompt=prompt, **GREEDY)).choices[0].text

        return await asyncio.gather(*map(streamed, PROMPTS), *map(whole, PROMPTS))

    tokens, requests = metric(server, "generation_tokens_total"), metric(server, "http_requests_total")
    assert asyncio.run(texts()) == expected * 2
    # However connections are spread over the processes, the sums are right.
    assert metric(server, "generation_tokens_total") == tokens + 8 * 2 * len(PROMPTS)
    assert metric(server, "request_success_total") >= 2 * len(PROMPTS)
    assert metric(server, "http_requests_total") >= requests + 2 * len(PROMPTS)
    assert metric(server, "num_requests_running") == 0


def test_the_official_client(server: ServerProcess, expected: list[str]) -> None:
    client = server.client()
    (scored,) = client.completions.create(prompt=PROMPTS[0], logprobs=2, **GREEDY).choices
    assert scored.text == expected[0] and scored.logprobs is not None and len(scored.logprobs.tokens or []) == 8
    several = client.completions.create(prompt=PROMPTS[0], n=3, seed=1, **GREEDY | {"temperature": 1})
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    ids = server.post("/tokenize", {"prompt": PROMPTS[1]}).json()["tokens"]
    assert client.completions.create(prompt=ids, **GREEDY).choices[0].text == expected[1]
    cut = expected[2][3:6]
    stopped_early = client.completions.create(prompt=PROMPTS[2], stop=[cut], **GREEDY).choices[0]
    assert stopped_early.text == expected[2][: expected[2].index(cut)] and stopped_early.finish_reason == "stop"
    batch = client.completions.create(prompt=PROMPTS[:3], **GREEDY)
    assert [choice.text for choice in batch.choices] == expected[:3]
    chat = client.chat.completions.create(messages=[{"role": "user", "content": "Hi"}], stream=True, **GREEDY)
    assert [chunk.choices[0].finish_reason for chunk in chat][-1] == "length"
    with pytest.raises(openai.NotFoundError, match="nowhere"):
        client.completions.create(**GREEDY | {"model": "nowhere"}, prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(**GREEDY | {"temperature": -1}, prompt="x")


def test_raw_sockets(server: ServerProcess) -> None:
    body = b'{"prompt": "Once", "max_tokens": 400, "ignore_eos": true, "stream": true}'
    with send(server, completion(body), body[:20]):
        pass  # half a body, then a disconnect
    with send(server, completion(body), body) as dropped:
        assert dropped.recv(100).startswith(b"HTTP/1.1 200")  # in the middle of its stream
    short = body.replace(b"400", b"5")
    with send(server, b"") as slow:
        for byte in completion(short) + short:
            slow.send(bytes([byte]))
        response = b""
        while b"[DONE]" not in response:
            response += slow.recv(7)
    eventually(lambda: idle(server))


def test_a_client_that_never_reads(server: ServerProcess) -> None:
    """Others continue, and its requests finish; test_lifecycle fills all socket buffers."""
    text = b'{"prompt": "Once", "max_tokens": 40, "n": 2, "ignore_eos": true, "stream": true, "logprobs": 5}'
    with send(server, completion(text), text):
        eventually(lambda: state(server)["requests"] == 2)
        assert server.client().completions.create(prompt="x", **GREEDY).choices[0].text
        eventually(lambda: state(server)["requests"] == 0)
    eventually(lambda: idle(server))


def test_the_processes_are_one_server(server: ServerProcess) -> None:
    """While one process is stopped, the other accepts every new connection: so each can be addressed."""
    if not server.apis:
        assert server.get("/load").json()["server_load"] == 0  # one process is one server
        return
    first, second = server.apis
    named = {"X-Request-Id": "same"}
    with stopped(second):
        stream = server.client(default_headers=named).completions.create(stream=True, **LONG)
        assert next(stream).id == "cmpl-same"
    with httpx.Client(base_url=server.url, timeout=SECONDS) as to_second:
        with stopped(first):
            assert to_second.get("/load").json()["server_load"] == 1
            short = {"prompt": "Once", "max_tokens": 1}
            assert to_second.post("/v1/completions", json=short, headers=named).json()["id"] == "cmpl-same"
        aborted = to_second.post("/abort_requests", json={"request_ids": ["cmpl-same", "other"]})
        assert aborted.json() == {"aborted": ["cmpl-same"]}
    assert list(stream)[-1].choices[0].finish_reason == "abort"
    with stopped(first):
        response = server.get("/metrics")  # without the other's part the counters would drop
        assert response.status_code == 503 and "does not respond" in response.text
    assert server.get("/metrics").status_code == 200
    eventually(lambda: idle(server))


def test_every_process_shows_the_whole_engine(server: ServerProcess) -> None:
    """The view is of the core: a watcher sees the requests of all API processes, and no text of theirs."""
    with httpx.Client(timeout=SECONDS) as client:
        client.post(f"{server.url}/v1/completions", json={"prompt": "Once", "max_tokens": 1})
        body = {"prompt": "a private question", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
        seen = ""
        with client.stream("POST", f"{server.url}/v1/completions", json=body) as generated:
            lines = generated.iter_lines()
            next(lines)
            for _ in range(2):  # whichever process answers
                with httpx.stream("GET", f"{server.url}/view/stream", timeout=SECONDS) as response:
                    samples = (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: "))
                    sample = next(each for each in samples if each["steps"] or not each["running"])
                assert [row[1] for row in sample["running"]] == [3]
                assert sample["blocks"]["total"] == BLOCKS and sample["stats"]["num_running"] == 1
                assert any(decode == 1 for _, _, _, _, decode, _, _ in sample["steps"])
                seen += json.dumps(sample)
        assert "private" not in seen and "question" not in seen
    eventually(lambda: idle(server))
