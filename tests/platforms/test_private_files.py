"""Code and weights are loaded from no folder that another user can write to."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.platforms.private_files import (
    PrivateFolder,
    UntrustedPathError,
    path_of,
    process_folder,
    require_private_tree,
)

OTHER_USER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


def test_a_folder_is_made_for_this_user_alone(tmp_path):
    with PrivateFolder(tmp_path / "cache" / "quire") as folder:
        assert folder.open("absent") is None
    for made in (tmp_path / "cache", tmp_path / "cache" / "quire"):
        assert made.stat().st_mode & 0o777 == 0o700


def test_what_is_put_can_be_opened(tmp_path):
    source = tmp_path / "source"
    source.write_text("made here")
    with PrivateFolder(tmp_path / "cache") as folder:
        folder.put("kept", source)
        fd = folder.open("kept")
    with os.fdopen(fd):
        assert path_of(fd).read_text() == "made here"
    assert [file.name for file in (tmp_path / "cache").iterdir()] == ["kept"]


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path, mode):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    with pytest.raises(UntrustedPathError, match=f"others can write to .*cache.*{mode:o}.*chmod 700"):
        PrivateFolder(tmp_path / "cache")


def test_below_a_folder_that_everyone_can_write_to_only_with_the_sticky_bit(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(UntrustedPathError, match=r"everyone can write to .*shared"):
        PrivateFolder(shared / "cache")
    shared.chmod(0o1777)
    PrivateFolder(shared / "cache").close()


@as_root
def test_another_users_folder_and_what_is_below_it_are_refused(tmp_path):
    home = tmp_path / "home"
    (home / "cache").mkdir(parents=True)
    os.chown(home / "cache", OTHER_USER, OTHER_USER)
    with pytest.raises(UntrustedPathError, match="belongs to another user"):
        PrivateFolder(home / "cache")
    with pytest.raises(UntrustedPathError, match="belongs to another user"):
        PrivateFolder(home / "cache" / "quire")
    assert not (home / "cache" / "quire").exists()


def test_a_planted_file_is_refused(tmp_path):
    (tmp_path / "elsewhere").write_text("planted")
    with PrivateFolder(tmp_path / "cache") as folder:
        planted = folder.path / "planted"
        planted.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(OSError):
            folder.open("planted")
        planted.unlink()
        planted.write_text("planted")
        planted.chmod(0o666)
        with pytest.raises(UntrustedPathError, match="others can write"):
            folder.open("planted")
        planted.unlink()
        os.mkfifo(planted, 0o600)  # nobody writes to it: opening must not wait
        with pytest.raises(UntrustedPathError, match="not a regular file"):
            folder.open("planted")


def test_a_tree_is_refused_for_an_unsafe_file_in_it(tmp_path):
    (tmp_path / "cache" / "kernel").mkdir(parents=True)
    (tmp_path / "cache").chmod(0o755)
    file = tmp_path / "cache" / "kernel" / "launcher.so"
    file.touch(0o644)
    require_private_tree(tmp_path / "cache")
    file.chmod(0o664)
    with pytest.raises(UntrustedPathError, match="launcher"):
        require_private_tree(tmp_path / "cache")
    (tmp_path / "cache").chmod(0o700)  # nobody else reaches it
    require_private_tree(tmp_path / "cache")


def test_a_process_folder_is_removed_at_exit(tmp_path):
    code = "from quire.platforms.private_files import process_folder as f; print(f(), oct(f().stat().st_mode & 0o777))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    folder, mode = done.stdout.split()
    assert mode == "0o700" and not Path(folder).exists()
    assert process_folder() == process_folder() and process_folder().is_dir()
