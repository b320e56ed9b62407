"""`quire serve -tp 2`: what one process says, and an end with a cause however a process ends."""

import os
import select
import signal
from pathlib import Path

import httpx
import openai
import pytest

from quire import LLM, SamplingParams
from tests.entrypoints.server_process import SECONDS, ServerProcess, server_process

FLAGS = ("--served-model-name", "tiny", "--num-gpu-blocks-override", "256", "-tp", "3", "--dtype", "float32")
FLAGS += ("--quantization", "dequantized")  # whole sums: groups of rounded inputs may be divided among ranks
REQUEST = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}


def workers(server: ServerProcess) -> dict[int, int]:
    """File descriptors of worker processes, by pid."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if b"quire.executor.worker_process" in command and parent in server.children:
            found[int(entry.name)] = os.pidfd_open(int(entry.name))
    return found


def assert_ended(descriptors: dict[int, int]) -> None:
    for pid, descriptor in descriptors.items():
        assert select.select([descriptor], [], [], 10)[0], f"worker {pid} is left"
        os.close(descriptor)


def test_killed_and_restarted(tmp_path: Path) -> None:
    """A worker, then the engine's process, then the server; each time with the text of one process."""
    options = {"dtype": "float32", "quantization": "dequantized", "max_model_len": 512, "num_gpu_blocks_override": 256}
    with LLM(**options) as llm:
        (output,) = llm.generate(REQUEST["prompt"], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    texts = [output.outputs[0].text]
    for killed in ("worker", "engine", "server"):
        folder = tmp_path / killed
        folder.mkdir()
        with server_process(folder, *FLAGS) as server:
            ranks = workers(server)
            assert len(ranks) == 3
            assert "3 ranks (tensor parallel 3), each" in server.log.read_text()
            client = server.client()
            texts.append(client.completions.create(**REQUEST).choices[0].text)
            endless = REQUEST | {"max_tokens": 500, "extra_body": {"ignore_eos": True}}
            stream = client.completions.create(**endless, stream=True)
            next(stream)
            pid = {"worker": max(ranks), "engine": server.engine, "server": server.process.pid}[killed]
            os.kill(pid, signal.SIGKILL)
            with pytest.raises((openai.APIError, httpx.TransportError)) as error:
                list(stream)
            code = server.process.wait(SECONDS)
            if killed == "worker":
                assert "the engine is not running" in str(error.value)
                assert f"worker process of rank 2 (pid {pid}) was killed by SIGKILL" in server.log.read_text()
            assert code == (-signal.SIGKILL if killed == "server" else 1)
            assert_ended(ranks)
    assert len(set(texts)) == 1


def test_an_idle_server_ends_with_its_worker(tmp_path: Path) -> None:
    with server_process(tmp_path, *FLAGS, "--engine-heartbeat-timeout", "4") as server:
        ranks = workers(server)
        os.kill(max(ranks), signal.SIGSTOP)
        assert server.process.wait(SECONDS) == 1
        assert f"(pid {max(ranks)}) has not responded for 4 s" in server.log.read_text()
        assert_ended(ranks)
