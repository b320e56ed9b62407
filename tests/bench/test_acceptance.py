"""What is to be shown on a GPU can be started: modules, test files and models of every command exist."""

import importlib.util
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from benchmarks.gpu import acceptance
from benchmarks.gpu.acceptance import PARTS, Part
from benchmarks.gpu.together import PROMPTS, SIZES, TIER_GIB, groups
from quire.bench.internal.card.models import GPU_MODELS, shape_of

COMMANDS = [command for part in PARTS.values() for command in part.commands]
MANY = """
import os, signal, sys, time
import pytest

pytestmark = pytest.mark.gpu

@pytest.fixture(scope="module", params=["one", "two"])
def model(request):
    return request.param

@pytest.mark.parametrize("number", range(20))
def test_many(model, number):
    with open(f"{os.path.dirname(__file__)}/ran", "a") as file:
        file.write(f"{model}-{number}\\n")

def test_fails():
    assert False, "on purpose"

def test_crashes():
    os.abort()

def test_loses_its_device(monkeypatch):
    class Torch:
        class cuda:
            is_initialized = staticmethod(lambda: True)
            synchronize = staticmethod(lambda: 1 / 0)
    sys.modules["torch"] = Torch
    assert False

def test_skips():
    pytest.skip("not here")

def test_is_left_out():
    raise AssertionError
"""
HANGING_TEST = """
import os, time
import pytest

pytestmark = pytest.mark.gpu

def test_passes():
    pass

def test_hangs():
    open(f"{os.path.dirname(__file__)}/begun", "w").close()
    time.sleep(600)
"""
HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_command_names_exists(command):
    words = command.split()
    assert words[0] == "-m" and importlib.util.find_spec(words[1]) is not None
    for word in words:
        path, _, name = word.partition("::")
        assert not word.startswith("tests/") or Path(path).exists(), word
        assert not name or f"def {name}(" in Path(path).read_text(), word
    if words[1] == "benchmarks.gpu.together":
        assert set(words[2].split(",")) <= SIZES.keys()
    if "--models" in words:
        assert set(words[words.index("--models") + 1].split(",")) <= set(GPU_MODELS)


def test_tiers_have_room_for_what_they_are_to_hold():
    """Prompts and what pushes them out, 128 KiB a token."""
    device, tier, (users, tokens, _) = SIZES["adapters"][1], TIER_GIB, PROMPTS
    shape = shape_of("llama3-8b")
    token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * 2
    given, prompt = users * tokens * token / 2**30, tokens * token / 2**30
    others = -(-device // prompt)
    assert token == 128 << 10 and given < device and others < 2 * users
    assert given + others * prompt < tier


def test_engines_that_start_together_fit_the_device():
    assert groups(["embeddings", "adapters", "deepseek-v2-lite", "llama3-8b"]) == [
        ["embeddings", "adapters", "deepseek-v2-lite"],
        ["llama3-8b"],
    ]
    assert set(SIZES) - {"embeddings", "adapters"} <= set(GPU_MODELS)


def test_every_test_runs_once_whatever_fails(tmp_path):
    """In two processes, of which one crashes, and one's device is lost."""
    (tmp_path / "test_many.py").write_text(MANY)
    prefix = tmp_path / "found"
    command = [sys.executable, "-m", "benchmarks.gpu.side_by_side", "2", prefix, tmp_path / "test_many.py"]
    options = ["-c", "pyproject.toml", "--rootdir", tmp_path, "--deselect", "test_many.py::test_is_left_out"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300)
    ran = (tmp_path / "ran").read_text().splitlines()
    assert sorted(ran) == sorted(f"{model}-{number}" for model in ("one", "two") for number in range(20)), done.stdout
    lines = done.stdout.splitlines()
    assert lines[:3] == [
        "failed: test_many.py::test_fails",
        "failed: test_many.py::test_loses_its_device",
        "not ended: test_many.py::test_crashes",
    ]
    assert lines[3].startswith("44 tests: ") and "40 passed" in lines[3] and "1 skipped" in lines[3]
    assert done.returncode == 1 and (tmp_path / "found-1.log").exists()
    assert list(tmp_path.glob("found-0*.xml"))  # the first one's, or that of the process after it if it crashed


def test_tests_that_hang_are_ended_and_told(tmp_path):
    (tmp_path / "test_hangs.py").write_text(HANGING_TEST)
    command = [sys.executable, "-m", "benchmarks.gpu.side_by_side", "1", tmp_path / "found", tmp_path / "test_hangs.py"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    while not (tmp_path / "begun").exists():
        assert process.poll() is None
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "not ended: " in printed and "2 tests: 1 passed, 1 not ended" in printed
    assert 'tests="1"' in (tmp_path / "found-0.xml").read_text()


def test_a_command_that_hangs_leaves_no_process_and_the_next_one_runs(tmp_path, monkeypatch, capsys):
    (tmp_path / "hangs.py").write_text(HANGS)
    folder = tmp_path / "out"
    folder.mkdir()
    monkeypatch.setattr(acceptance, "LEFT_TO_NEXT", 5)
    commands = (f"{tmp_path}/hangs.py", "-m json.tool --help", "-m json.tool {out}/no-such-file")
    monkeypatch.setitem(PARTS, "part", Part("", commands))
    acceptance.run("part", folder, time.monotonic() + 14, tmp_path / "out.tar.gz")
    printed = capsys.readouterr().out
    assert "part: out of time" in printed and "part: 0 after" in printed and "no-such-file" in printed
    child = next(line for line in (folder / "part.log").read_text().splitlines() if line.startswith("child "))
    status = Path(f"/proc/{child.split()[1]}/status")
    assert not status.exists() or "zombie" in status.read_text()
    with tarfile.open(tmp_path / "out.tar.gz") as archive:
        assert archive.getnames() == ["out", "out/part.log"]


def test_the_list_has_every_part():
    command = [sys.executable, "-m", "benchmarks.gpu.acceptance", "--list"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [line.split()[0] for line in printed.splitlines()] == list(PARTS)
