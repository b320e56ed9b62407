"""Runs the files interpreted_*.py: Triton decides on its interpreter when it is imported, so each gets a process. A
third of their cases, or with QUIRE_ALL_KERNELS=1 (make test-kernels) all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SLICE = "tests.kernels.slice_of_cases"


@pytest.mark.parametrize("file", sorted(path.name for path in HERE.glob("interpreted_*.py")))
def test_kernels_in_the_interpreter(file):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", SLICE, str(HERE / file)]
    done = subprocess.run(
        command,
        cwd=HERE.parent.parent,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
