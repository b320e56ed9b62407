"""Abandoned socket folders are removed at the next start."""

import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from quire.distributed.socket_folder import SocketFolder

KILLED = "import os; from quire.distributed.socket_folder import SocketFolder; SocketFolder(); os.kill(os.getpid(), 9)"


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def test_the_folder_of_a_killed_process_is_removed_by_the_next(parent: Path) -> None:
    assert subprocess.run([sys.executable, "-c", KILLED]).returncode == -9
    (left,) = parent.iterdir()
    one = SocketFolder()
    assert not left.exists() and list(parent.iterdir()) == [one.path]
    one.remove()
    assert not list(parent.iterdir())


def test_a_folder_in_use_is_not_removed(parent: Path) -> None:
    first = SocketFolder()
    (first.path / "socket").touch()
    second = SocketFolder()
    assert (first.path / "socket").exists() and second.path != first.path
    first.remove()
    first.remove()
    second.remove()


def test_a_long_temporary_folder_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket's path has at most 107 bytes."""
    for length in (60, 79, 80, 150):
        parent = tmp_path / "t"
        parent = Path(str(parent).ljust(length, "x"))
        parent.mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(parent))
        folder = SocketFolder()
        try:
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(str(folder.path / "out-host"))
            assert (folder.path.parent == parent) is (len(str(parent)) <= 79)
        finally:
            folder.remove()
