"""Workers in Ray actors, on a cluster of two nodes of this machine: they say what one worker says, and end together.

Run by `make test-ray`: Ray is not among the tools of other tests.
"""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from quire import LLM, SamplingParams
from quire.config.environment import process_environment
from quire.distributed.machine import free_port
from tests.entrypoints.server_process import server_process
from tests.executor.test_multiproc import PARAMS, PROMPTS, SMALL, outputs
from tests.tiny_models import save_tiny

LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


def start(model, **options):
    options = {"distributed_executor_backend": "ray", "tensor_parallel_size": 2} | options
    return LLM(model, skip_tokenizer_init=True, **SMALL, **options)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save_tiny("llama", folder)
    return str(folder)


@pytest.fixture(scope="module")
def ray():
    return pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster(ray):
    """Two nodes of one core each."""
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    found.add_node(num_cpus=1)
    ray.init(address=found.address, logging_level="ERROR", log_to_driver=False)
    yield found
    ray.shutdown()
    found.shutdown()


@pytest.fixture(scope="module")
def wanted(model):
    llm = start(model, distributed_executor_backend="uni", tensor_parallel_size=1)
    try:
        return outputs(llm)
    finally:
        llm.shutdown()


def executor(llm):
    return llm.llm_engine.client.core.executor


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def nothing_is_left(ray, pids):
    groups = ray.util.placement_group_table().values()
    return not any(map(lives, pids)) and all(group["state"] == "REMOVED" for group in groups)


@pytest.mark.parametrize(
    "shape", [{"tensor_parallel_size": 2}, {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}]
)
@pytest.mark.parametrize("depth", [0, 1])
def test_two_nodes_say_what_one_worker_says(ray, cluster, model, wanted, shape, depth):
    llm = start(model, **shape, async_scheduling=bool(depth))
    pids = executor(llm).pids
    try:
        assert outputs(llm) == wanted
        assert "on 2 Ray nodes" in executor(llm).describe()
        assert len(llm.collective_rpc("get_draft_profile")) == 2
    finally:
        llm.shutdown()
    assert nothing_is_left(ray, pids)


def test_logprobs(cluster, model):
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    found = []
    for options in ({"distributed_executor_backend": "uni", "tensor_parallel_size": 1}, {}):
        llm = start(model, **options)
        try:
            (one,) = llm.generate([{"prompt_token_ids": PROMPTS[1]}], params, use_tqdm=False)
            found.append([sorted(step) for step in one.outputs[0].logprobs])
        finally:
            llm.shutdown()
    assert found[0] == found[1]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (signal.SIGKILL, r"the Ray actor of rank {rank} \(process {pid} on .*\) has ended"),
        (signal.SIGSTOP, r"the Ray actor of rank {rank} \(process {pid} on .*\) has not responded for 10 s"),
    ],
)
def test_an_actor_that_ends_in_a_step_is_named(ray, cluster, model, rank, sent, message):
    llm = start(model, engine_heartbeat_timeout=10)
    pids = executor(llm).pids
    try:
        llm.llm_engine.add_request("one", {"prompt_token_ids": PROMPTS[0]}, LONG)
        llm.llm_engine.step()
        os.kill(pids[rank], sent)
        with pytest.raises(Exception, match=message.format(rank=rank, pid=pids[rank])):
            while True:
                llm.llm_engine.step()
    finally:
        llm.shutdown()
    assert nothing_is_left(ray, pids)


def test_an_actor_that_ends_while_idle_is_told(ray, cluster, model):
    llm = start(model)
    told, known = [], threading.Event()
    try:
        executor(llm).on_failure(lambda error: (told.append(str(error)), known.set()))
        os.kill(executor(llm).pids[1], signal.SIGKILL)
        assert known.wait(60)
        with pytest.raises(Exception, match="rank 1"):
            llm.generate([{"prompt_token_ids": [5]}], PARAMS[2], use_tqdm=False)
    finally:
        llm.shutdown()
    assert "the Ray actor of rank 1" in told[0]


def test_more_ranks_than_the_cluster_has(ray, cluster, model):
    with pytest.raises(
        ValueError, match=r"4 ranks need 1 CPU each, but the Ray cluster has 2 CPU on 2 nodes \(1 \+ 1\)"
    ):
        start(model, tensor_parallel_size=4)


def test_a_cluster_that_others_use(ray, cluster, model):
    group = ray.util.placement_group([{"CPU": 1}])
    assert group.wait(30)
    try:
        with pytest.raises(
            RuntimeError, match=r"were not placed within 2 s .* 2 CPU on 2 nodes \(1 \+ 1\), of which 1 is"
        ):
            start(model, distributed_timeout_seconds=2)
    finally:
        ray.util.remove_placement_group(group)


def test_bad_weights(ray, cluster, model, tmp_path):
    """An error of a worker's start is the user's to read, and leaves nothing."""
    for file in Path(model).iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(Exception, match="safetensors"):
        start(str(tmp_path))
    assert nothing_is_left(ray, [])


def test_a_node_that_is_lost(ray, cluster, model):
    node = cluster.add_node(num_cpus=2)  # fits both ranks, so that they are packed there
    llm = start(model)
    try:
        assert "on 1 Ray node," in executor(llm).describe()
        cluster.remove_node(node, allow_graceful=False)
        with pytest.raises(Exception, match=r"the Ray actor of rank \d \(process \d+ on .*\) has ended"):
            for _ in range(1000):  # until Ray ends the actors of a node without its daemon
                llm.generate([{"prompt_token_ids": PROMPTS[0]}], LONG, use_tqdm=False)
    finally:
        llm.shutdown()


def test_a_cluster_that_is_not_there(ray, model):
    """In a process of its own: this one has joined a cluster."""
    options = "skip_tokenizer_init=True, tensor_parallel_size=2, distributed_executor_backend='ray'"
    code = f"from quire import LLM; LLM({model!r}, {options})"
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    ended = subprocess.run(
        [sys.executable, "-c", code], env=process_environment({"RAY_ADDRESS": address}), capture_output=True, text=True
    )
    assert f"the Ray cluster at {address} (RAY_ADDRESS) cannot be reached" in ended.stderr


def test_a_server_whose_actor_is_killed(cluster, model, tmp_path, monkeypatch):
    """The stream ends with an error that names the rank, and so does the server; the next one starts."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    flags = ["--model", model, "--skip-tokenizer-init", "-tp", "2", "--distributed-executor-backend", "ray"]
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        with server_process(tmp_path / name, *flags) as server:
            pid = int(re.search(r"RayWorker pid=(\d+)", ray_actors())[1])
            body = {"prompt": [5, 6, 7], "max_tokens": 500, "temperature": 0, "ignore_eos": True, "stream": True}
            body |= {"return_token_ids": True}  # without a tokenizer there is nothing else to send
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
                lines = response.iter_lines()
                assert next(lines).startswith("data: ")
                os.kill(pid, signal.SIGKILL)
                assert any("error" in line for line in lines)
            assert server.process.wait(60) == 1
            assert "the Ray actor of rank" in server.log.read_text()
            assert not re.search("RayWorker", ray_actors())


def ray_actors():
    """One line for each process."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if b"ray::RayWorker" in (process / "cmdline").read_bytes():
                found.append(f"RayWorker pid={process.name}")
        except OSError:
            pass  # it has ended
    return "\n".join(found)


def test_without_ray(monkeypatch, model):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"needs Ray, which cannot be imported .*: pip install quire\[ray\]"):
        start(model)
