import os
import threading

import pytest
import torch

from quire.config import EngineConfig
from quire.kernels import native
from quire.platforms import cpu_cores, current_platform
from quire.platforms.cpu_cores import Claim, Core, choose_cores, choose_threads, physical_cores, within_quota


@pytest.mark.parametrize(
    ("cores", "quota", "expected"), [(8, None, 8), (8, 3.0, 3), (8, 2.9, 2), (8, 0.3, 1), (2, 16.0, 2)]
)
def test_cores_within_the_quota(cores, quota, expected):
    assert within_quota(cores, quota) == expected


def test_hardware_threads_of_a_core_are_one(tmp_path):
    for cpu in range(4):
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
        (tmp_path / f"cpu{cpu}" / f"node{cpu % 2}").mkdir()
    assert physical_cores(tmp_path, {0, 1, 2, 3}) == [Core(0, (0, 2)), Core(1, (1, 3))]
    assert physical_cores(tmp_path, {1, 2}) == [Core(1, (1,)), Core(0, (2,))]
    assert physical_cores(tmp_path / "unknown", {5, 7}) == [Core(0, (5,)), Core(0, (7,))]


def test_as_few_nodes_as_hold_the_threads():
    cores = [Core(node, (cpu,)) for cpu, node in enumerate([0, 0, 1, 1, 1, 1, 2, 2, 2])]

    def nodes(threads):
        return [core.node for core in choose_cores(cores, threads)]

    assert nodes(1) == [0]
    assert nodes(2) == [0, 0]
    assert nodes(3) == [2, 2, 2]
    assert nodes(4) == [1] * 4
    assert nodes(5) == [1, 1, 1, 1, 2]
    assert nodes(9) == [1] * 4 + [2] * 3 + [0] * 2


def in_a_thread(call):
    """The result of `call` in a new thread, whose affinity ends with it."""
    results = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


def test_a_single_node_changes_no_affinity():
    cores = physical_cores()
    assert in_a_thread(lambda: cpu_cores.stay_on_nodes(cores, cores[:1])) is None or len({c.node for c in cores}) > 1


def test_threads_stay_on_their_nodes(monkeypatch):
    """With two simulated nodes; memory comes from the first."""
    asked = []
    monkeypatch.setattr(cpu_cores, "_prefer_memory_of", lambda node: asked.append(node) or True)
    cpu = min(os.sched_getaffinity(0))
    cores = [Core(0, (cpu,)), Core(1, (1000,))]

    def stay():
        return cpu_cores.stay_on_nodes(cores, cores[:1]), os.sched_getaffinity(0)

    assert in_a_thread(stay) == ("computing on NUMA node 0, with its memory", {cpu})
    assert asked == [0]
    monkeypatch.undo()
    assert in_a_thread(lambda: cpu_cores._prefer_memory_of(0)) in (True, False)  # refused in some containers


def test_requested_threads():
    count = len(os.sched_getaffinity(0))
    assert choose_threads(None) >= 1
    assert choose_threads(count) == count
    with pytest.raises(ValueError, match=f"cpu_threads is {count + 1}; .* allowed: 1 to {count}"):
        choose_threads(count + 1)
    with pytest.raises(ValueError, match="cpu_threads is 0; it must be at least 1"):
        EngineConfig.from_kwargs(cpu_threads=0)


@pytest.mark.parametrize(
    ("cores", "quota", "threads", "pin", "expected"),
    [
        (2, None, None, True, [10, 11]),
        (2, None, None, False, []),
        (2, None, 1, True, []),
        (2, 1.0, None, True, []),
        (2, 1.5, 2, True, []),
        (1, None, None, True, []),
    ],
)
def test_pinned_only_when_threads_fill_the_cores(monkeypatch, cores, quota, threads, pin, expected):
    monkeypatch.setattr(cpu_cores, "physical_cores", lambda: [Core(0, (10 + i,)) for i in range(cores)])
    monkeypatch.setattr(cpu_cores, "cpu_quota", lambda: quota)
    monkeypatch.setattr(cpu_cores, "allowed_cpus", lambda: set(range(10, 10 + cores)))
    assert current_platform("cpu", threads, pin).cores_to_pin() == expected


def test_one_engine_at_a_time_pins(monkeypatch):
    monkeypatch.setattr(cpu_cores, "physical_cores", lambda: [Core(0, (20,)), Core(0, (21,))])
    monkeypatch.setattr(cpu_cores, "cpu_quota", lambda: None)
    monkeypatch.setattr(cpu_cores, "allowed_cpus", lambda: {20, 21})
    first, second = current_platform("cpu"), current_platform("cpu")
    assert first.cores_to_pin() == first.cores_to_pin() == [20, 21]
    assert second.cores_to_pin() == []
    assert Claim([22]).granted
    del first, second
    assert Claim([20, 21]).granted


@pytest.mark.skipif(native.library() is None, reason="needs a C compiler")
def test_compute_threads_are_pinned_and_no_others():
    cpus = sorted(os.sched_getaffinity(0))
    wanted = [cpus[0], cpus[-1]]
    before = {int(task) for task in os.listdir("/proc/self/task")}

    def compute():
        torch.set_num_threads(2)
        torch.ones(1 << 20).sum()  # starts the pool
        done = native.pin_threads(wanted)
        new = {int(task) for task in os.listdir("/proc/self/task")} - before
        return done, sorted(min(os.sched_getaffinity(task)) for task in new if len(os.sched_getaffinity(task)) == 1)

    threads = torch.get_num_threads()
    try:
        assert in_a_thread(compute) == (True, sorted(wanted))
    finally:
        torch.set_num_threads(threads)
    assert os.sched_getaffinity(0) == set(cpus)
    assert not native.pin_threads([]) and not native.pin_threads([-1] * threads)


@pytest.mark.skipif(native.library() is None, reason="needs a C compiler")
def test_the_main_thread_is_never_pinned():
    """It starts other threads and processes, which would inherit its core."""
    mask = os.sched_getaffinity(0)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert native.pin_threads([min(mask)])
        assert os.sched_getaffinity(0) == mask
    finally:
        torch.set_num_threads(threads)
