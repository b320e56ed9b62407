"""Where the compiled C kernels come from: our own cache, or a compiler, never a file that others could have planted."""

import ctypes
import logging
import os
import shutil
import subprocess
import sys

import pytest

from quire.kernels.native import build
from quire.kernels.native.build import library

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
FILES = ("threads.c",)
OTHER_USER = 65534


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch, caplog):
    """An empty cache, and a library that is asked for anew every time."""
    caplog.set_level(logging.INFO, "quire")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "quire"


def load():
    return library.__wrapped__("-fopenmp", only=FILES)


def is_ours(made) -> bool:
    return made is not None and hasattr(made, "quire_pin_threads") and not hasattr(made, "planted")


@pytest.fixture
def kept(cache, tmp_path, monkeypatch):
    """Where our library would be; never loaded from there, since the loader knows libraries by their names."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    load()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    cache.mkdir(mode=0o700, parents=True)
    (made,) = (tmp_path / "other" / "quire").iterdir()
    return cache / made.name


def plant(file, mode=0o755):
    """A library of somebody else's in the place of ours."""
    source = file.with_suffix(".c")
    source.write_text("int planted = 1;")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(file), str(source)], check=True)
    file.chmod(mode)


def test_the_first_load_compiles_and_the_second_does_not(cache, monkeypatch):
    assert is_ours(load())
    assert cache.stat().st_mode & 0o777 == 0o700
    (kept,) = cache.iterdir()
    assert kept.stat().st_mode & 0o022 == 0
    monkeypatch.setattr(build, "_compiled", lambda *_: pytest.fail("compiled again"))
    assert is_ours(load())


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_library_in_a_folder_that_others_can_write_to_is_not_loaded(cache, kept, caplog, mode):
    plant(kept)
    cache.chmod(mode)
    assert is_ours(load())
    assert "every start compiles them anew" in caplog.text and "chmod 700" in caplog.text


def test_a_library_that_others_can_write_to_is_not_loaded_and_is_replaced(kept, caplog):
    plant(kept, 0o666)
    assert is_ours(load())
    assert "others can write to" in caplog.text
    assert kept.stat().st_mode & 0o022 == 0 and is_ours(ctypes.CDLL(str(kept)))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("what", ["file", "folder", "home"])
def test_nothing_of_another_users_is_loaded(cache, kept, caplog, what):
    plant(kept)
    os.chown({"file": kept, "folder": cache, "home": cache.parent}[what], OTHER_USER, OTHER_USER)
    assert is_ours(load())
    assert "belongs to another user" in caplog.text


def test_a_planted_link_is_not_followed(kept, tmp_path, caplog):
    plant(tmp_path / "elsewhere.so")
    kept.symlink_to(tmp_path / "elsewhere.so")
    assert is_ours(load())
    assert "made anew" in caplog.text


def test_without_a_place_for_a_cache_kernels_are_compiled(monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    assert is_ours(load())
    assert "every start compiles them anew" in caplog.text


def test_nothing_is_left_in_the_temporary_folder(tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    assert is_ours(load()) and not any((tmp_path / "tmp").iterdir())


def test_two_libraries_are_not_taken_for_one_another(cache):
    first, second = load(), library.__wrapped__("-fopenmp", "-DQUIRE_NO_AMX", only=("amx.c",))
    assert hasattr(first, "quire_pin_threads") and not hasattr(second, "quire_pin_threads")


@pytest.mark.parametrize("unsafe", [True, False])
def test_triton_is_pointed_to_a_folder_of_ours_where_its_cache_is_not_safe(tmp_path, unsafe):
    folder = tmp_path / "triton"
    folder.mkdir(mode=0o700)
    if unsafe:
        folder.chmod(0o777)
    code = "import quire.kernels.triton, os; print(os.environ['TRITON_CACHE_DIR'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TRITON_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout.strip() != str(folder)) == unsafe
    assert ("Triton's cache is not used" in done.stderr) == unsafe
