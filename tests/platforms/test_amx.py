import pytest

from quire.platforms.cpu_facts import cap_onednn_if_amx_is_broken
from quire.platforms.cpuid import Registers, load_cpuid

AMX = 1 << 22 | 1 << 24
NOTHING = Registers(0, 0, 0, 0)


def fake_cpuid(max_leaf: int, amx: bool, palettes: int):
    leaves = {
        0: Registers(max_leaf, 0, 0, 0),
        7: Registers(0, 0, 0, AMX if amx else 0),
        0x1D: Registers(palettes, 0, 0, 0),
    }
    return lambda leaf, subleaf: leaves.get(leaf, NOTHING) if leaf <= max_leaf else NOTHING


@pytest.mark.parametrize(("max_leaf", "palettes"), [(0x1C, 1), (0x20, 0)])
def test_missing_tile_leaf_caps_onednn(max_leaf, palettes):
    environ: dict[str, str] = {}
    note = cap_onednn_if_amx_is_broken(fake_cpuid(max_leaf, True, palettes), environ)
    assert environ == {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
    assert note is not None and "AMX" in note


@pytest.mark.parametrize("cpuid", [fake_cpuid(0x20, True, 1), fake_cpuid(0x10, False, 0), None])
def test_machines_with_working_amx_are_unchanged(cpuid):
    environ: dict[str, str] = {}
    assert cap_onednn_if_amx_is_broken(cpuid, environ) is None
    assert environ == {}


def test_the_users_setting_wins():
    environ = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    assert cap_onednn_if_amx_is_broken(fake_cpuid(0x1C, True, 0), environ) is None
    assert environ == {"ONEDNN_MAX_CPU_ISA": "AVX2"}


def test_cpuid_runs_where_it_can():
    cpuid = load_cpuid()
    if cpuid is None:
        pytest.skip("no CPUID here")
    assert cpuid(0, 0).eax > 0
    assert cpuid(0, 0) == cpuid(0, 0)
