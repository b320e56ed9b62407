import gc
import subprocess
import sys
import weakref
from pathlib import Path

from quire.platforms.start_up import collector_paused


def run_python(source: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_what_is_made_while_the_collector_rests_is_old_afterwards():
    gc.collect()
    with collector_paused():
        assert not gc.isenabled()
        made = [[] for _ in range(10_000)]
        assert any(item is made for item in gc.get_objects(generation=0))
    assert gc.isenabled()
    assert any(item is made for item in gc.get_objects(generation=2))
    assert gc.get_freeze_count() == 0


def test_garbage_of_the_pause_is_collected_later():
    class Node:
        pass

    with collector_paused():
        node = Node()
        node.itself = node
        left = weakref.ref(node)
        del node
    gc.collect()
    assert left() is None


def test_a_collector_that_a_program_has_disabled_stays_so():
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_objects_that_a_program_has_frozen_stay_so():
    gc.freeze()
    try:
        with collector_paused():
            pass
        assert gc.isenabled() and gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_importing_llm_leaves_torch_to_its_constructor():
    assert run_python("import sys; from quire import LLM; print('torch' in sys.modules, 'jinja2' in sys.modules)") == [
        "False",
        "False",
    ]


def test_torch_finds_its_library_loaded():
    loaded, product = run_python(
        "import sys, threading\n"
        "from quire.platforms.start_up import start_loading_torch\n"
        "start_loading_torch()\n"
        "[thread.join() for thread in threading.enumerate() if thread.name == 'quire-torch']\n"
        "print('libtorch_cpu' in open('/proc/self/maps').read() and 'torch' not in sys.modules)\n"
        "import torch\n"
        "print(int((torch.ones(300, 300) @ torch.ones(300, 300)).sum()))\n"
    )
    assert (loaded, int(product)) == ("True", 300**3)


def test_a_program_may_end_while_the_library_is_loaded():
    assert run_python("from quire.platforms.start_up import start_loading_torch; start_loading_torch(); print(1)") == [
        "1"
    ]


def test_a_torch_that_is_imported_is_left_alone(monkeypatch):
    import threading

    import torch  # noqa: F401

    from quire.platforms.start_up import start_loading_torch

    monkeypatch.setattr(threading, "Thread", None)
    start_loading_torch()


def test_a_broken_torch_is_left_to_its_import(tmp_path: Path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('broken')")
    source = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from quire.platforms.start_up import start_loading_torch\n"
        "start_loading_torch()\n"
        "try:\n    import torch\nexcept ImportError as error:\n    print(error)\n"
    )
    assert run_python(source) == ["broken"]
