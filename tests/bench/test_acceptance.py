"""What is to be shown on a GPU can be started: modules, test files and models of every command exist."""

import importlib.util
from pathlib import Path

import pytest

from benchmarks.gpu.acceptance import PARTS
from quire.bench.internal.card.models import GPU_MODELS


@pytest.mark.parametrize("command", [command for part in PARTS.values() for command in part.commands])
def test_what_a_command_names_exists(command):
    words = command.split()
    assert words[0] == "-m" and importlib.util.find_spec(words[1]) is not None
    for word in words:
        assert not word.startswith("tests/") or Path(word).exists(), word
    if "--models" in words:
        assert set(words[words.index("--models") + 1].split(",")) <= set(GPU_MODELS)
