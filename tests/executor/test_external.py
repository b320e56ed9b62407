"""Ranks that torchrun starts: each says what one process says."""

import ast
import subprocess
import sys

import pytest

from quire.config import EngineConfig
from quire.executor.factory import make_executor
from tests.executor.test_multiproc import outputs, start
from tests.tiny_models import save_tiny

PROGRAM = """
import sys
from tests.executor.test_multiproc import outputs, start
ranks = {"tensor_parallel_size": 2, "distributed_timeout_seconds": 60}
with start(sys.argv[1], distributed_executor_backend="external_launcher", **ranks) as llm:
    found = outputs(llm)
    print(f"found {found}\\n", end="", flush=True)
"""


def test_every_rank_says_what_one_process_says(tmp_path):
    save_tiny("llama", tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    with start(str(tmp_path)) as llm:
        wanted = outputs(llm)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(tmp_path / "program.py"), str(tmp_path)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    found = [line.removeprefix("found ") for line in done.stdout.splitlines() if line.startswith("found ")]
    assert [ast.literal_eval(one) for one in found] == [wanted, wanted]


def test_as_many_processes_as_ranks():
    config = EngineConfig.from_kwargs(tensor_parallel_size=2, distributed_executor_backend="external_launcher")
    with pytest.raises(ValueError, match=r"started 1 processes \(WORLD_SIZE\), but tensor_parallel_size is 2"):
        make_executor(config)
