import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
EXPECTED = {
    "offline.py": "'The capital of Italy is' ->",
    "chat.py": "continued: The moon",
    "streaming.py": "Once upon a time",
    "rl_update.py": "weights 1: 1 of 1 answers equal transformers', 1 differ from those before",
    "train_eagle.py": "tokens a step",
    "train_lora.py": "1 of 1 answers equal peft's",
}
SMALLER = {
    "rl_update.py": "--rounds 1 --samples 2 --prompts 1 --max-tokens 12",
    "train_eagle.py": "--num-prompts 16 --max-tokens 16 --draft-vocab 256 --epochs 1 --output head",
    "train_lora.py": "--steps 4 --batch 1 --prompts 1 --output adapter",
}


def test_every_example_is_run_here():
    assert {file.name for file in EXAMPLES.glob("*.py")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_runs(name, tmp_path):
    command = [sys.executable, EXAMPLES / name, *SMALLER.get(name, "").split()]
    child = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=tmp_path)
    assert child.returncode == 0, child.stderr
    assert EXPECTED[name] in child.stdout
