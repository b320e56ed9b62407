import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
EXPECTED = {
    "offline.py": "'The capital of Italy is' ->",
    "chat.py": "continued: The moon",
    "streaming.py": "Once upon a time",
}


def test_every_example_is_run_here():
    assert {file.name for file in EXAMPLES.glob("*.py")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_runs(name):
    child = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=120)
    assert child.returncode == 0, child.stderr
    assert EXPECTED[name] in child.stdout
