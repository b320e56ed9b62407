"""Processes that torchrun starts, each with an engine of its own: all say what one process says."""

import json
import signal
import subprocess
import sys

import pytest
import transformers

from quire import LLM
from quire.config import EngineConfig
from quire.config.environment import LAUNCHED, process_environment
from quire.distributed.machine import free_port
from quire.executor.factory import make_executor
from quire.messages.lora import LoRARequest
from tests.executor.test_multiproc import SMALL, outputs, start
from tests.lora.random_adapters import random_adapter
from tests.tiny_models import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save_tiny("llama", folder)
    return str(folder)


@pytest.fixture(scope="module")
def wanted(model):
    llm = start(model)
    try:
        return outputs(llm)
    finally:
        llm.shutdown()


def torchrun(processes, model, folder, task="once", **options):
    options = {"distributed_executor_backend": "external_launcher", "distributed_timeout_seconds": 120} | options
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return subprocess.run(
        [*command, "-m", "tests.executor.launched", model, str(folder), task, json.dumps(options)],
        env=process_environment({"OMP_NUM_THREADS": "1"}),
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("twice", {"tensor_parallel_size": 2}),
        ("own_group", {"tensor_parallel_size": 2, "async_scheduling": False}),
        ("once", {"pipeline_parallel_size": 2}),
    ],
)
def test_every_process_says_what_one_says(model, wanted, tmp_path, task, options):
    ended = torchrun(2, model, tmp_path, task, **options)
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        for found in json.loads((tmp_path / f"{rank}.json").read_text()):
            assert found == wanted


def test_processes_that_read_an_adapter(model, wanted, tmp_path):
    """Each by itself: they use it once all have."""
    adapter = random_adapter(transformers.AutoModelForCausalLM.from_pretrained(model), 1)
    loras = [LoRARequest("a", 1, str(adapter.save(tmp_path / "adapter"))), None] * 2
    with start(model, enable_lora=True) as llm:
        adapted = outputs(llm, loras)
    ended = torchrun(2, model, tmp_path, "adapter", tensor_parallel_size=2, enable_lora=True)
    assert ended.returncode == 0, ended.stderr
    assert adapted != wanted
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [adapted, wanted]


def test_any_launcher_and_a_process_that_is_killed(model, tmp_path):
    """Without torchrun, which would end the other."""
    options = json.dumps({"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"})
    command = [sys.executable, "-m", "tests.executor.launched", model, str(tmp_path), "killed", options]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port(""))}
    ranks = [
        subprocess.Popen(command, env=process_environment(shared | {"RANK": rank, "LOCAL_RANK": rank}))
        for rank in ("0", "1")
    ]
    assert [rank.wait(300) for rank in ranks] == [0, -signal.SIGKILL]
    _, error = json.loads((tmp_path / "0.json").read_text())
    assert f"rank 1 (process {ranks[1].pid}) has ended" in error


def test_processes_that_send_different_requests(model, tmp_path):
    ended = torchrun(2, model, tmp_path, "different", tensor_parallel_size=2)
    assert ended.returncode != 0
    assert "have planned different steps" in ended.stderr
    assert "must send the same requests in the same order" in ended.stderr


def test_as_many_processes_as_ranks(model, tmp_path):
    ended = torchrun(2, model, tmp_path, tensor_parallel_size=4)
    assert (
        "has started 2 processes (WORLD_SIZE), but tensor_parallel_size x pipeline_parallel_size is 4" in ended.stderr
    )
    assert "torchrun --nproc-per-node 4" in ended.stderr


def test_without_a_launcher(model, monkeypatch):
    for variable in LAUNCHED:
        monkeypatch.delenv(variable.name, raising=False)
    with pytest.raises(
        ValueError, match=r"has no RANK, WORLD_SIZE, .*: start your program as torchrun --nproc-per-node 2"
    ):
        start(model, tensor_parallel_size=2, distributed_executor_backend="external_launcher")


def test_a_server_starts_workers_itself(model):
    config = EngineConfig.from_kwargs(model=model, distributed_executor_backend="external_launcher")
    with pytest.raises(ValueError, match="is for programs that make an LLM in each process of torchrun"):
        make_executor(config, in_engine_process=True)
    with pytest.raises(Exception, match="use mp or ray"):
        LLM(
            model,
            multiprocess=True,
            skip_tokenizer_init=True,
            distributed_executor_backend="external_launcher",
            **SMALL,
        )


def test_speculation_by_measured_time(model, monkeypatch):
    for variable in LAUNCHED:
        monkeypatch.setenv(variable.name, "1")
    with pytest.raises(ValueError, match="pass spec_adaptive=False"):
        start(
            model,
            distributed_executor_backend="external_launcher",
            speculative_config={"method": "ngram", "num_speculative_tokens": 2},
        )
