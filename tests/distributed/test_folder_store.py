"""KV-cache blocks in a folder: what is found, what is not trusted, what is removed."""

import errno
import mmap
import os
import shutil
import stat
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from quire.distributed.kv_offload.block_store import StoreKeys
from quire.distributed.kv_offload.folder_store import FolderStore
from quire.distributed.kv_offload.folder_upkeep import FolderUpkeep, WriterFolder, block_files
from quire.distributed.kv_offload.io_pool import IOPool, Urgency

SIZE = 8192
KEYS = [StoreKeys(1).key(bytes([i]) * 32, 0, 0) for i in range(8)]


def buffer(value=0):
    """At a page's boundary, as O_DIRECT wants it."""
    memory = memoryview(mmap.mmap(-1, SIZE))
    memory[:] = bytes([value]) * SIZE
    return memory


@pytest.fixture
def store(tmp_path):
    opened = FolderStore(tmp_path / "kv", max_bytes=1 << 30)
    yield opened
    opened.close()


def files_in(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("direct", [True, False])
def test_another_engine_reads_what_one_has_written(tmp_path, direct):
    first, second = (FolderStore(tmp_path / "kv", 1 << 30, direct) for _ in range(2))
    assert first.put(KEYS[:2], [buffer(1), buffer(2)]) == [True, True]
    assert second.contains(KEYS[:3]) == [True, True, False]
    found = [buffer(), buffer(), buffer()]
    assert second.get(KEYS[:3], found) == [True, True, False]
    assert [bytes(b) for b in found[:2]] == [b"\1" * SIZE, b"\2" * SIZE]
    assert first.put(KEYS[1:3], [buffer(9), buffer(3)]) == [True, True]  # the one that is there stays as it is
    assert second.get(KEYS[1:2], found[:1]) == [True] and bytes(found[0]) == b"\2" * SIZE
    summary = second.stats.summary()
    assert (summary["read_blocks"], summary["read_hits"], summary["read_bytes"]) == (4, 3, 3 * SIZE)
    assert summary["lookup_hits"] == 2 and summary["read_p99"] > 0
    first.close()
    second.close()
    assert all(len(name) == 67 for name in files_in(tmp_path / "kv"))  # nothing but blocks is left


def test_only_the_owner_can_read(store, tmp_path):
    store.put(KEYS[:1], [buffer(1)])
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "kv").rglob("*") if path.is_file()}
    folders = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "kv", *(tmp_path / "kv").iterdir())}
    assert modes == {0o600} and folders == {0o700}


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "longer", "another"])
def test_a_damaged_file_is_a_miss_and_removed(store, damage, caplog):
    store.put(KEYS[:2], [buffer(1), buffer(2)])
    path = store.path_of(KEYS[0])
    content = bytearray(path.read_bytes())
    content[100] ^= damage == "flipped"
    content = {"cut": content[:SIZE], "empty": b"", "longer": content + b"x"}.get(damage, content)
    path.write_bytes(store.path_of(KEYS[1]).read_bytes() if damage == "another" else content)
    assert store.get(KEYS[:1], [buffer()]) == [False]
    assert not path.exists() and store.stats.reads.errors == 1
    assert "damaged" in caplog.text
    assert store.put(KEYS[:1], [buffer(3)]) == [True] and store.get(KEYS[:1], [buffer()]) == [True]


def test_what_cannot_be_written_is_counted_and_said_once(store, tmp_path, monkeypatch, caplog):
    """A full disk: nothing half-written stays."""
    monkeypatch.setattr(os, "writev", lambda fd, parts: os.write(fd, parts[0][:100]))
    assert store.put(KEYS[:2], [buffer(1), buffer(2)]) == [False, False]
    assert store.stats.writes.errors == 2 and caplog.text.count("cannot be written") == 1
    monkeypatch.undo()
    assert store.contains(KEYS[:2]) == [False, False]
    assert store.put(KEYS[:2], [buffer(1), buffer(2)]) == [True, True]
    assert len(list(block_files(tmp_path / "kv"))) == 2


def test_the_oldest_files_are_evicted(store, tmp_path):
    store.put(KEYS, [buffer(i) for i in range(8)])
    for i, key in enumerate(KEYS):
        os.utime(store.path_of(key), (1e9 + i, 1e9))
    assert store.get(KEYS[:1], [buffer()]) == [True]  # now it is the newest
    size = store.path_of(KEYS[0]).stat().st_size
    small = FolderUpkeep(tmp_path / "kv", max_bytes=5 * size)
    small.look()
    assert store.contains(KEYS) == [True, *[False] * 4, True, True, True] and small.num_evicted == 4


def test_two_engines_evict_at_once_and_too_much_is_not_gone(store, tmp_path):
    store.put(KEYS, [buffer(i) for i in range(8)])
    size = store.path_of(KEYS[0]).stat().st_size
    both = [FolderUpkeep(tmp_path / "kv", max_bytes=5 * size) for _ in range(2)]
    threads = [threading.Thread(target=upkeep.look) for upkeep in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(store.contains(KEYS)) == 4


KILLED = """
import os, sys
from pathlib import Path
from quire.distributed.kv_offload.folder_store import FolderStore
store = FolderStore(Path(sys.argv[1]), 1 << 30)
(store._writing() / "half").write_bytes(b"x" * 5000)
os.kill(os.getpid(), 9)
"""


def test_a_killed_writer_leaves_nothing(tmp_path):
    folder = tmp_path / "kv"
    killed = subprocess.run([sys.executable, "-c", KILLED, folder], check=False)
    assert killed.returncode == -9 and len(files_in(folder)) == 2  # its lock, and what it was writing
    living = WriterFolder(folder)
    FolderUpkeep(folder, 1 << 30).look()
    assert files_in(folder) == [f"{living.path.name}/lock"]  # another writer is left alone
    living.remove()
    assert files_in(folder) == []


def test_folders_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is no folder"):
        FolderStore(tmp_path / "file", 1 << 30)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ValueError, match="chmod 700"):
        FolderStore(tmp_path / "open", 1 << 30)


def test_keys_tell_ranks_groups_and_worlds_apart():
    keys = {StoreKeys(world).key(b"h" * 32, group, rank) for world in (1, 2) for group in (0, 1) for rank in (0, 1)}
    assert len(keys) == 8 and StoreKeys(2).of_all_ranks(b"h", 1) == [StoreKeys(2).key(b"h", 1, r) for r in (0, 1)]


def test_reads_come_before_writes_and_lookups_before_both():
    pool, done, gate = IOPool(1), [], threading.Event()
    pool.submit(Urgency.READ, gate.wait)
    for urgency in (Urgency.WRITE, Urgency.READ, Urgency.LOOKUP, Urgency.WRITE):
        pool.submit(urgency, lambda urgency=urgency: done.append(urgency))
    gate.set()
    last = threading.Event()
    pool.submit(Urgency.WRITE, last.set)
    assert last.wait(60) and done == sorted(done) and len(done) == 4
    pool.close()


def test_writes_are_finished_and_never_keep_reads_waiting():
    pool, gate, read, written = IOPool(2), threading.Event(), threading.Event(), []
    pool.submit(Urgency.WRITE, gate.wait)
    pool.submit(Urgency.WRITE, lambda: written.append(1))
    pool.submit(Urgency.READ, read.set)
    assert read.wait(60) and not written
    gate.set()
    pool.close()
    assert written == [1]


def test_random_traffic_from_many_threads(store):
    """Whatever is read is what was written for that key."""
    wrong, rng = [], np.random.default_rng(0)
    jobs = [rng.integers(0, 8, 40) for _ in range(4)]

    def work(picks):
        for i in picks:
            store.put([KEYS[i]], [buffer(i + 1)])
            found = buffer()
            if store.get([KEYS[i]], [found]) == [True] and bytes(found) != bytes([i + 1]) * SIZE:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(picks,)) for picks in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and store.stats.reads.errors == store.stats.writes.errors == 0


def test_files_of_others_are_not_evicted(store, tmp_path):
    store.put(KEYS, [buffer(i) for i in range(8)])
    others = [tmp_path / "kv" / "en" / "thesis.txt", tmp_path / "kv" / "ab" / "notes"]
    for other in others:
        other.parent.mkdir(exist_ok=True)
        other.write_text("mine")
        os.utime(other, (1, 1))
    FolderUpkeep(tmp_path / "kv", max_bytes=1).look()
    assert not any(store.contains(KEYS)) and all(other.exists() for other in others)


def test_what_cannot_be_removed_keeps_nothing_else(store, tmp_path):
    """A disk must not fill up because of it."""
    store.put(KEYS, [buffer(i) for i in range(8)])
    oldest = store.path_of(KEYS[0])
    oldest.unlink()
    oldest.mkdir()
    os.utime(oldest, (1, 1))
    (tmp_path / "kv" / "evict.lock").mkdir()
    FolderUpkeep(tmp_path / "kv", max_bytes=1).look()
    assert not any(store.contains(KEYS)) and oldest.is_dir()


@pytest.mark.parametrize(("fails", "name"), [("open", "lock"), ("rename", "")])
def test_what_no_writer_can_be_made_of_does_not_stay(store, tmp_path, monkeypatch, fails, name):
    """It is tried again with every block."""
    call = getattr(os, fails)

    def full(path, *rest, **named):
        if ".writing-" in str(path) and str(path).endswith(name):
            raise OSError(errno.ENOSPC, "no room")
        return call(path, *rest, **named)

    monkeypatch.setattr(os, fails, full)
    assert store.put(KEYS[:3], [buffer(i) for i in range(3)]) == [False] * 3
    assert not list((tmp_path / "kv").iterdir())
    assert not any(".writing-" in str(path) for path in open_files())
    monkeypatch.undo()
    assert store.put(KEYS[:1], [buffer(1)]) == [True]


def open_files():
    for number in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own
            yield number.readlink()


def test_a_block_that_can_never_be_read_is_not_found_again(store, monkeypatch):
    store.put(KEYS[:1], [buffer(1)])
    with monkeypatch.context() as broken:
        broken.setattr(os, "readv", lambda *_: _raise(errno.EMFILE))
        assert store.get(KEYS[:1], [buffer()]) == [False]
        assert store.contains(KEYS[:1]) == [True]  # it may be read later
        broken.setattr(os, "readv", lambda *_: _raise(errno.EIO))
        assert store.get(KEYS[:1], [buffer()]) == [False]
    assert store.contains(KEYS[:1]) == [False] and store.stats.reads.errors == 2
    assert store.put(KEYS[:1], [buffer(1)]) == store.get(KEYS[:1], [buffer()]) == [True]


def _raise(number):
    raise OSError(number, os.strerror(number))


def test_a_folder_that_hangs_does_not_keep_the_process(monkeypatch):
    monkeypatch.setattr("quire.distributed.kv_offload.io_pool.CLOSE_SECONDS", 0.01)
    pool, begun, server_is_back = IOPool(2), threading.Event(), threading.Event()

    def hangs():
        begun.set()
        server_is_back.wait()

    pool.submit(Urgency.WRITE, hangs)
    assert begun.wait(60)
    pool.close()
    assert not server_is_back.is_set()
    server_is_back.set()


def test_a_folder_that_is_removed_is_made_again(store):
    folder = store._folder
    key, data = KEYS[0], buffer(1)
    assert store.put([key], [data]) == [True]
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        shutil.rmtree(folder)
        assert store.contains([key]) == [False]
        assert store.put([key], [data]) == [True]
    assert store.contains([key]) == [True] and len(os.listdir("/proc/self/fd")) == before
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    shutil.rmtree(folder)
    folder.mkdir()
    folder.chmod(0o777)  # somebody else's by now, for all we know
    assert [store.put([key], [data]) for _ in range(2)] == [[False], [False]]


def test_closing_does_not_wait_for_a_file_system_that_hangs(tmp_path, monkeypatch):
    begun, server_is_back = threading.Event(), threading.Event()
    monkeypatch.setattr("quire.distributed.kv_offload.folder_store.CLOSE_SECONDS", 0.01)
    monkeypatch.setattr(FolderUpkeep, "look", lambda self: (begun.set(), server_is_back.wait()))
    store = FolderStore(tmp_path / "store", 1 << 20)
    assert begun.wait(60)
    store.close()
    assert not server_is_back.is_set()
    server_is_back.set()


def test_what_is_no_file_is_a_miss(store):
    key, found = KEYS[0], buffer()
    path = store.path_of(key)
    path.parent.mkdir()
    os.mkfifo(path)
    assert store.get([key], [found]) == [False]  # and not waited for
    path.unlink(missing_ok=True)
    path.mkdir()
    assert store.get([key], [found]) == store.put([key], [found]) == [False]
    path.rmdir()
    path.symlink_to("/etc/passwd")
    assert store.get([key], [found]) == store.contains([key]) == [False]
