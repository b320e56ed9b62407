"""Engines that start together on one host divide its memory."""

import dataclasses
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from quire.config import EngineConfig
from quire.config.pooling import PoolingSetup
from quire.distributed.kv_offload import host_memory
from quire.distributed.kv_offload.host_memory import HostMemory
from quire.platforms import cpu_cgroup, cpu_facts, defaults
from quire.platforms.defaults import default_offloading_gib
from quire.platforms.host_claims import HostClaims

GIB = 1 << 30


@pytest.fixture
def free(monkeypatch):
    """What the system and the control group have left, in GiB."""
    found = {"machine": 100.0, "group": None}
    monkeypatch.setattr(cpu_facts, "machine_memory", lambda: int(found["machine"] * GIB))
    monkeypatch.setattr(cpu_cgroup, "memory_left", lambda: found["group"] and int(found["group"] * GIB))
    return found


@pytest.fixture
def claims(tmp_path, free):
    return HostClaims(tmp_path / "claims", group="/mine")


def gib(num_bytes):
    return round(num_bytes / GIB, 2)


def test_each_takes_half_of_what_is_left_for_all(claims):
    held = [claims.take(30 * GIB, shrinks=True) for _ in range(4)]
    assert [gib(one.size) for one in held] == [30, 15, 7.5, 3.75]
    assert default_offloading_gib(claims) == 0  # less than is worth having
    assert gib(claims.free()) == 100 - 56.25
    held[0].release()
    assert gib(claims.share()) == 16.88


def test_it_does_not_matter_how_much_is_pinned_by_now(claims, free):
    held = claims.take(30 * GIB, shrinks=False)
    before = claims.share(), claims.free()
    held.use(20 * GIB)
    free["machine"] -= 20
    assert (claims.share(), claims.free()) == before


def test_engines_of_one_server_divide_a_share(claims):
    assert default_offloading_gib(claims, num_engines=4) == pytest.approx(7.5)


def test_engines_that_only_pool_have_no_tier_by_default(claims, monkeypatch):
    gpu = SimpleNamespace(
        name="cuda", has_own_memory=True, default_dtype=lambda stored: torch.bfloat16, default_max_num_seqs=8,
        default_max_num_batched_tokens=8192, short_step_tokens=0,
    )  # fmt: skip
    monkeypatch.setattr(defaults, "current_platform", lambda *_: gpu)
    monkeypatch.setattr(defaults, "HostClaims", lambda: claims)

    def size(**options):
        config = EngineConfig.from_kwargs(**options)
        pools = config.pooling.runner == "pooling"
        setup = PoolingSetup("embed", ("embed",)) if pools else None
        config = config.replace(pooling=dataclasses.replace(config.pooling, setup=setup))
        return defaults.with_platform_defaults(config).transfer.kv_offloading_size

    assert size() == 30
    assert size(runner="pooling") == 0
    assert size(runner="pooling", kv_offloading_size=4) == 4


def test_a_control_group_has_its_own_limit_and_claims(claims, free, tmp_path):
    free["group"] = 20.0
    other = HostClaims(tmp_path / "claims", group="/other")
    held = other.take(40 * GIB, shrinks=False)
    assert gib(claims.share()) == 6 and gib(claims.free()) == 20
    free["machine"] = 50.0  # of which the other group's engine is yet to use 40
    assert claims.share() == 0 and gib(claims.free()) == 10
    held.release()


def test_what_is_wished_for_is_given_and_seen(claims):
    held = claims.take(90 * GIB, shrinks=False)
    assert gib(held.size) == 90
    assert claims.share() == 0 and gib(claims.free()) == 10


def test_claims_end_with_their_process(claims, tmp_path):
    code = (
        "import sys; from pathlib import Path; from quire.platforms.host_claims import HostClaims;"
        "held = HostClaims(Path(sys.argv[1])).take(10 << 30, shrinks=False); print('held', flush=True); input()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "claims")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        assert gib(claims.free()) == 90
        other.kill()
        other.wait()
    assert gib(claims.free()) == 100
    assert list((tmp_path / "claims").iterdir()) == []


def test_many_at_once_never_claim_too_much(claims):
    held = []
    threads = [threading.Thread(target=lambda: held.append(claims.take(99 * GIB, shrinks=True))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(held) == 16 and gib(sum(one.size for one in held)) <= 60


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path, free):
    (tmp_path / "elsewhere").mkdir()
    os.symlink(tmp_path / "elsewhere", tmp_path / "claims")
    claims = HostClaims(tmp_path / "claims")
    held = claims.take(50 * GIB, shrinks=True)
    assert gib(held.size) == 30 and list((tmp_path / "elsewhere").iterdir()) == []
    held.use(GIB)
    held.release()


def test_a_tier_has_as_many_slots_as_are_granted(claims, monkeypatch):
    pinned = torch.empty
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, pin_memory: pinned(shape, dtype=dtype))
    pages = [torch.zeros(4, 1 << 20, dtype=torch.uint8)] * 2
    slot_bytes = 2 << 20
    left = claims.take(60 * GIB - 20 * slot_bytes, shrinks=False)
    memory = HostMemory(pages, 100, pinned=True, claim=lambda size: claims.take(size, shrinks=True))
    memory._thread.join()
    assert memory.num_ready == 10
    assert claims.free() == 40 * GIB + 20 * slot_bytes  # of what is pinned the system knows
    memory.close()
    left.release()
    assert gib(claims.free()) == 100


def test_what_cannot_be_pinned_is_not_claimed(claims, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no more pages may be locked")

    monkeypatch.setattr(torch, "empty", refuse)
    pages = [torch.zeros(4, 1 << 20, dtype=torch.uint8)]
    memory = HostMemory(pages, 100, pinned=True, claim=lambda size: claims.take(size, shrinks=False))
    memory._thread.join()
    assert memory.num_ready == 0 and gib(claims.free()) == 100
    memory.close()


def test_pinning_pauses_for_those_who_launch(monkeypatch):
    """Longer than it took: whoever waits for the driver is served in between."""
    clock, pinned, pauses = iter(range(100)), torch.empty, []
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, pin_memory: pinned(shape, dtype=dtype))
    monkeypatch.setattr(host_memory.time, "perf_counter", lambda: next(clock))
    parts: list[torch.Tensor] = []
    wanted = SimpleNamespace(wait=pauses.append)
    host_memory._pin(parts, [(2, 3)] * 3, torch.uint8, threading.Event(), wanted, None)
    assert len(parts) == 3 and pauses == [host_memory.PAUSES] * 2


@pytest.mark.parametrize(("mib", "slots"), [(2, 32), (1.75, 36), (23, 11), (65, 3), (300, 1)])
def test_parts_are_nearly_filled(mib, slots):
    assert host_memory._slots_of_a_part(int(mib * 2**20)) == slots
