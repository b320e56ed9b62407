"""An engine on two machines, which are two addresses and real processes here: the tokens of one, and shared ends."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from quire import LLM
from quire.config import EngineConfig
from quire.distributed.machine import free_port
from quire.executor.multiproc import WorkersLostError
from quire.executor.node_messages import End, difference, introduction, read_message, secure, write_message
from quire.executor.nodes import NodeLinks
from quire.executor.worker_calls import TypedCalls
from quire.messages.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroup, SlidingWindowSpec
from tests.executor.test_multiproc import outputs, rank_of, start
from tests.tiny_models import save_tiny

ADDRESS = "127.0.0.2"  # node 0's; nothing listens at 127.0.0.1
TOKEN = "a secret of these tests"
SECONDS = 60.0
SMALL = ("--max-model-len", "128", "--dtype", "float32", "--kv-cache-memory-bytes", "4194304")
SMALL += ("--max-num-batched-tokens", "32", "--skip-tokenizer-init", "-tp", "2", "--nnodes", "2", "--headless")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save_tiny("llama", folder)
    return str(folder)


@pytest.fixture(scope="module")
def wanted(model):
    with start(model) as llm:
        return outputs(llm)


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("QUIRE_CLUSTER_TOKEN", TOKEN)


@pytest.fixture
def port() -> int:
    return free_port(ADDRESS)


class Node:
    """A headless one."""

    def __init__(self, model: str, port: int, log: Path, *flags: str, token: str = TOKEN) -> None:
        self.log = log
        with log.open("w") as output:
            where = ("--master-addr", ADDRESS, "--master-port", str(port), "--node-rank", "1")
            self.process = subprocess.Popen(
                [sys.executable, "-m", "quire", "serve", model, *SMALL, *where, *flags],
                stderr=output,
                env=os.environ | {"QUIRE_CLUSTER_TOKEN": token},
            )

    def wait_for(self, line: str) -> None:
        while line not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)

    def end(self) -> tuple[int, str]:
        """Its exit code and log, once it has ended."""
        code = self.process.wait(SECONDS)
        return code, self.log.read_text()


@contextlib.contextmanager
def headless(model: str, port: int, folder: Path, *flags: str, **options: str) -> Iterator[Node]:
    node = Node(model, port, folder / "node-1.log", *flags, **options)
    try:
        yield node
    finally:
        node.process.kill()
        node.process.wait()


def node_0(model: str, port: int, **options) -> LLM:
    options = {"tensor_parallel_size": 2} | options
    return start(model, nnodes=2, master_addr=ADDRESS, master_port=port, **options)


def test_two_nodes_say_what_one_process_says(model, wanted, port, tmp_path):
    with headless(model, port, tmp_path) as other:
        with node_0(model, port) as llm:
            assert outputs(llm) == wanted
            with pytest.raises(ValueError, match="function rank_of cannot be called on workers of several machines"):
                llm.collective_rpc(rank_of)
            assert len(llm.collective_rpc("describe")) == 2
            with pytest.raises(ValueError, match=rf"port {port} of {ADDRESS} is in use; .*--master-port"):
                node_0(model, port)
        code, log = other.end()
    assert code == 0
    assert "node 1 has ended, with the engine" in log


def test_a_node_that_is_killed_ends_the_engine(model, wanted, port, tmp_path):
    """Here with the last stage, whose rank answers."""
    stages = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    with (
        headless(model, port, tmp_path, "-tp", "1", "-pp", "2") as other,
        node_0(model, port, **stages) as llm,
    ):
        assert outputs(llm) == wanted
        other.process.kill()
        with pytest.raises(WorkersLostError, match=r"node 1 \(rank 1\) is gone"):
            outputs(llm)


def test_a_worker_that_is_killed_on_another_node_is_named(model, port, tmp_path):
    with headless(model, port, tmp_path) as other, node_0(model, port) as llm:
        (pid,) = children(other.process.pid)
        os.kill(int(pid), signal.SIGKILL)
        with pytest.raises(WorkersLostError, match=rf"node 1: .* rank 1 \(pid {pid}\) was killed by SIGKILL"):
            outputs(llm)
        code, log = other.end()
    assert code == 1
    assert f"rank 1 (pid {pid}) was killed by SIGKILL" in log


def children(pid: int) -> list[str]:
    """Started by any of its threads."""
    return [each for task in Path(f"/proc/{pid}/task").iterdir() for each in (task / "children").read_text().split()]


PROGRAM = """
import sys
from tests.executor.test_nodes import node_0
llm = node_0(sys.argv[1], int(sys.argv[2]))
print("ready", flush=True)
sys.stdin.read()
"""


def test_other_nodes_end_when_node_0_is_killed(model, port, tmp_path):
    with headless(model, port, tmp_path) as other:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, model, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            process.kill()
        code, log = other.end()
    assert code == 1
    assert f"node 0 at {ADDRESS}:{port} has ended, or the link to it is lost" in log


def test_a_node_that_never_joins(model, port):
    with pytest.raises(RuntimeError, match=r"node 1 of 2 did not join within 1 s \(--distributed-timeout-seconds\)$"):
        node_0(model, port, distributed_timeout_seconds=1)


def test_node_0_never_answers(model, port, tmp_path):
    with headless(model, port, tmp_path, "--distributed-timeout-seconds", "1") as other:
        code, log = other.end()
    assert code == 1
    assert f"node 0 at {ADDRESS}:{port} did not answer" in log


def test_another_token_is_refused(model, port, tmp_path):
    with headless(model, port, tmp_path, token="another secret of someone") as other:
        other.wait_for("node 1 waits for node 0")  # imports may take longer than node 0 waits
        with pytest.raises(RuntimeError, match=r"node 1 of 2 did not join .*another QUIRE_CLUSTER_TOKEN was refused"):
            node_0(model, port, distributed_timeout_seconds=8)
        code, log = other.end()
    assert code == 1
    assert "its QUIRE_CLUSTER_TOKEN is another one" in log


def test_options_that_differ(model, port, tmp_path):
    problem = "node 1 has --max-model-len 64, node 0 has 128; all nodes must have the same"
    with headless(model, port, tmp_path, "--max-model-len", "64") as other:
        with pytest.raises(ValueError, match=problem):
            node_0(model, port)
        code, log = other.end()
    assert code == 1
    assert f"refuses: {problem}" in log


def test_two_nodes_with_the_same_rank(port):
    config = EngineConfig.from_kwargs(pipeline_parallel_size=3, nnodes=3, master_addr=ADDRESS, master_port=port)
    links, mine = NodeLinks(config), introduction(config, devices=None)
    context = zmq.Context()
    nodes = [context.socket(zmq.DEALER) for _ in range(2)]
    problem = "two nodes have --node-rank 1; each must have its own"
    for node in nodes:
        secure(node, TOKEN, server=False)
        node.connect(f"tcp://{ADDRESS}:{port}")
        node.send_multipart(write_message(msgspec.structs.replace(mine, node=1)))
    with pytest.raises(ValueError, match=problem):
        links.join(mine, nodes=3, needed=1, timeout=SECONDS)
    links.close(problem)
    assert [read_message(node.recv_multipart()) for node in nodes] == [End(problem)] * 2
    context.destroy(linger=0)


def test_what_nodes_must_have():
    config = EngineConfig.from_kwargs(tensor_parallel_size=4, nnodes=2)
    mine = introduction(config, devices=2)
    other = msgspec.structs.replace(mine, node=1)
    assert difference(mine, other, needed=2) is None
    few, old = msgspec.structs.replace(other, devices=1), msgspec.structs.replace(other, version="0.0.1")
    assert difference(mine, few, needed=2).startswith("node 1 has 1 GPU, but gets 2 ranks; allowed: at most a rank for")
    assert difference(mine, old, needed=2).startswith("node 1 has quire 0.0.1, node 0 has ")


def test_a_token_is_needed(model, port, monkeypatch):
    monkeypatch.delenv("QUIRE_CLUSTER_TOKEN")
    with pytest.raises(ValueError, match=r"QUIRE_CLUSTER_TOKEN is not set: .*openssl rand"):
        node_0(model, port)
    monkeypatch.setenv("QUIRE_CLUSTER_TOKEN", "short")
    with pytest.raises(ValueError, match=r"QUIRE_CLUSTER_TOKEN is too short: .*at least 16"):
        node_0(model, port)


def test_wrong_options():
    with pytest.raises(ValueError, match=r"node_rank is 2, nnodes is 2; allowed: 0 to 1 \(--node-rank\)"):
        EngineConfig.from_kwargs(tensor_parallel_size=2, nnodes=2, node_rank=2)
    with pytest.raises(ValueError, match=r"is 3, nnodes is 2; .* must divide their number \(--nnodes\)"):
        EngineConfig.from_kwargs(tensor_parallel_size=3, nnodes=2)
    with pytest.raises(ValueError, match="nnodes is 2, which distributed_executor_backend 'ray' does not use"):
        EngineConfig.from_kwargs(tensor_parallel_size=2, nnodes=2, distributed_executor_backend="ray")


def test_calls_are_plain_data():
    """What is sent about a cache of several kinds is what is read."""
    calls = TypedCalls()
    specs = {0: FullAttentionSpec(16, 2, 8, "float32"), 1: SlidingWindowSpec(16, 2, 8, "float32", sliding_window=4)}
    assert calls.read_value("kv_cache_specs", calls.write_value("kv_cache_specs", specs)) == specs
    config = KVCacheConfig(7, (KVCacheGroup((0,), specs[0]), KVCacheGroup((1,), specs[1])))
    read = calls.read_call(calls.write_call("initialize_kv_cache", (config, 128, print), {}))
    assert read.method == "initialize_kv_cache"
    assert read.args[:2] == (config, 128)
    with pytest.raises(
        ValueError, match="__init__ cannot be called on workers of several machines; allowed: adapter_news"
    ):
        calls.write_call("__init__", (), {})
