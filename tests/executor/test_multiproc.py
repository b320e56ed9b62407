"""Workers in processes of their own: they say what one process says, and end together."""

import gc
import os
import select
import signal
import subprocess
import sys
import tempfile

import pytest

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.executor.multiproc import MultiProcExecutor, WorkersLostError
from tests.tiny_models import save_tiny

PROMPTS = [[5, 6, 7], list(range(3, 40)), [209, 210, 105, 106, 107] * 4, [4, 8, 15, 16, 23, 42]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=1.2, top_k=20, top_p=0.9, seed=5, max_tokens=12, repetition_penalty=1.3),
]
SMALL = {"max_model_len": 128, "dtype": "float32", "kv_cache_memory_bytes": 1 << 22, "max_num_batched_tokens": 32}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save_tiny("llama", folder)
    return str(folder)


def start(model, **options):
    return LLM(model, skip_tokenizer_init=True, **SMALL, **options)


def outputs(llm, loras=None):
    found = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], PARAMS, use_tqdm=False, lora_request=loras)
    return [list(one.outputs[0].token_ids) for one in found]


@pytest.fixture(scope="module")
def wanted(model):
    with start(model) as llm:
        return outputs(llm)


def test_two_processes_say_what_one_says(llm, wanted):
    assert outputs(llm) == wanted


def test_two_processes_without_asynchronous_scheduling(model, wanted):
    with start(model, tensor_parallel_size=2, async_scheduling=False) as llm:
        assert outputs(llm) == wanted


def test_sizes_and_executors():
    config = EngineConfig.from_kwargs(tensor_parallel_size=2, pipeline_parallel_size=3)
    assert config.parallel.num_ranks == 6
    with pytest.raises(ValueError, match=r"'uni' has one worker, .* is 6; use 'mp'"):
        EngineConfig.from_kwargs(tensor_parallel_size=2, pipeline_parallel_size=3, distributed_executor_backend="uni")


def test_a_rank_that_never_joins(model):
    """Nothing is imported in a second."""
    with pytest.raises(RuntimeError, match=r"rank 0, 1 of 2 did not start within 1 s \(--distributed-timeout-seconds"):
        start(model, tensor_parallel_size=2, distributed_timeout_seconds=1)


def broken(*_):
    raise RuntimeError("launch failed")


def break_step(worker, ranks):
    """The next step fails where logits are computed."""
    if worker.rank in ranks:
        worker.model.compute_logits = broken


def break_sampling(worker):
    """The next step fails where the rank that answers samples, as by a user's logits processor."""
    if worker.world.answers:
        worker.runner.sampler.parameters.upload = broken


def mend(worker):
    worker.model.__dict__.pop("compute_logits", None)
    worker.runner.sampler.parameters.__dict__.pop("upload", None)


def rank_of(worker):
    return worker.rank


def failing(worker):
    raise KeyError(f"rank {worker.rank}")


def test_calls_of_workers(llm):
    assert llm.collective_rpc(rank_of) == [0, 1]
    with pytest.raises(KeyError, match="rank 0"):
        llm.collective_rpc(failing)
    with pytest.raises(ValueError, match="workers have no method no_such_method"):
        llm.collective_rpc("no_such_method")
    assert llm.collective_rpc(rank_of) == [0, 1]


def test_a_step_that_fails_on_all_ranks_fails_alone(llm, wanted):
    llm.collective_rpc(break_step, args=((0, 1),))
    (failed,) = llm.generate([{"prompt_token_ids": PROMPTS[0]}], PARAMS[0], use_tqdm=False)
    assert failed.outputs[0].finish_reason == "error"
    llm.collective_rpc(mend)
    assert outputs(llm) == wanted


def test_sampling_that_fails_on_the_rank_that_answers_fails_alone(llm, wanted):
    llm.collective_rpc(break_sampling)
    (failed,) = llm.generate([{"prompt_token_ids": PROMPTS[0]}], PARAMS[0], use_tqdm=False)
    assert failed.outputs[0].finish_reason == "error"
    llm.collective_rpc(mend)
    assert outputs(llm) == wanted


def test_a_step_that_fails_on_one_rank_ends_the_engine_with_the_cause(model):
    with start(model, tensor_parallel_size=2) as llm:
        processes = watched(llm)
        llm.collective_rpc(break_step, args=((1,),))
        with pytest.raises(WorkersLostError, match=r"a step failed on rank 1 and not on all others: .*launch failed"):
            outputs(llm)
        assert_ended(processes)
        with pytest.raises(WorkersLostError, match="rank 1"):
            outputs(llm)


def break_layers(worker):
    """The next step fails in another layer on each rank, and no step after that."""
    mlp = worker.model.layers[1 + 2 * worker.rank].mlp

    def fail_once(*_, **__):
        del mlp.forward
        raise RuntimeError(f"no memory in layer {1 + 2 * worker.rank}")

    mlp.forward = fail_once


def test_a_step_that_fails_in_different_layers_ends_the_engine(model):
    """The first to fail goes on to the next plan, whose collectives the other takes for those of its own."""
    with start(model, tensor_parallel_size=2) as llm:
        processes = watched(llm)
        llm.collective_rpc(break_layers)
        with pytest.raises(
            WorkersLostError, match=r"failed at different places: on rank 0: .* in layer 1; on rank 1: .* in layer 3"
        ):
            outputs(llm)
        assert_ended(processes)


@pytest.fixture(scope="module")
def llm(model):
    with start(model, tensor_parallel_size=2) as one:
        yield one


def watched(llm):
    """File descriptors of the worker processes, readable once they have ended."""
    executor = llm.llm_engine.client.core.executor
    assert isinstance(executor, MultiProcExecutor)
    return [os.pidfd_open(pid) for pid in executor.pids]


def assert_ended(descriptors):
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], 10)[0], "a worker is left"
        os.close(descriptor)


def test_a_worker_that_is_killed(model):
    with start(model, tensor_parallel_size=2) as llm:
        processes = watched(llm)
        pid = llm.llm_engine.client.core.executor.pids[0]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkersLostError, match=rf"worker process of rank 0 \(pid {pid}\) was killed by SIGKILL"):
            outputs(llm)
        assert_ended(processes)


def size_of(worker, data):
    return len(data)


def test_another_worker_that_is_killed_while_large_messages_are_sent(model):
    with start(model, tensor_parallel_size=2) as llm:
        processes, large = watched(llm), bytes(1 << 20)
        assert llm.collective_rpc(size_of, args=(large,)) == [1 << 20] * 2
        os.kill(llm.llm_engine.client.core.executor.pids[1], signal.SIGKILL)
        with pytest.raises(WorkersLostError, match=r"rank 1 .* was killed by SIGKILL"):
            while True:
                llm.collective_rpc(size_of, args=(large,))
        assert_ended(processes)


def test_options_that_cannot_be_sent_leave_nothing(model, tmp_path, monkeypatch):
    """A class that no other process can import."""
    methods = dict.fromkeys(("add_row", "remove_row", "apply", "sampled"), broken)
    processor = type("Local", (), methods | {"changes_argmax": True, "active": True})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match=r"worker processes cannot be sent these options: .*Local.*can be imported"):
        start(model, tensor_parallel_size=2, logits_processors=[processor])
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert not list(tmp_path.iterdir())


def test_a_worker_that_is_stopped(model):
    with start(model, tensor_parallel_size=2, engine_heartbeat_timeout=5) as llm:
        processes = watched(llm)
        pid = llm.llm_engine.client.core.executor.pids[1]
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(WorkersLostError, match=rf"rank 1 \(pid {pid}\) has not responded for 5 s"):
            outputs(llm)
        assert_ended(processes)


PROGRAM = """
import sys
from tests.executor.test_multiproc import start
llm = start(sys.argv[1], tensor_parallel_size=2)
print(*llm.llm_engine.client.core.executor.pids, flush=True)
if sys.argv[2] == "steps":
    while True:
        llm.generate([{"prompt_token_ids": [3, 4, 5]}], use_tqdm=False)
if sys.argv[2] == "idle":
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("doing", "end"), [("steps", "kill"), ("idle", "kill"), ("steps", "terminate"), ("exit", None)]
)
def test_workers_end_with_their_executor(model, tmp_path, doing, end):
    """However it ends; and nothing is left in its folder of temporary files."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, model, doing],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    with process:
        assert process.stdout is not None
        pids = process.stdout.readline().split()
        workers = [os.pidfd_open(int(pid)) for pid in pids] if end else []
        if end:
            getattr(process, end)()
        code = process.wait(60)
    assert code == {"kill": -signal.SIGKILL, "terminate": -signal.SIGTERM, None: 0}[end]
    assert_ended(workers)
    assert not list(tmp_path.iterdir())
    assert not [name for name in os.listdir("/dev/shm") if "quire" in name]
