"""Runs the files interpreted_*.py: Triton decides on its interpreter when it is imported, so they get processes, some
share one, since imports take seconds. A fifth of their cases, or with QUIRE_ALL_KERNELS=1 (make test-kernels) all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SLICE = "tests.kernels.slice_of_cases"
FILES = sorted(path.name for path in HERE.glob("interpreted_*.py"))
PROCESSES = len(FILES) if os.environ.get("QUIRE_ALL_KERNELS") else 5


@pytest.mark.slow
@pytest.mark.parametrize("files", [FILES[i::PROCESSES] for i in range(PROCESSES)], ids=" ".join)
def test_kernels_in_the_interpreter(files):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", SLICE]
    command += [str(HERE / file) for file in files]
    done = subprocess.run(
        command,
        cwd=HERE.parent.parent,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
