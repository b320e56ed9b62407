"""The AMX kernel on any machine: its own source, with the tile instructions in software, against float32 products."""

import ctypes
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quire.kernels import native
from quire.kernels.native.build import FOLDER, SECOND_TRY, library
from quire.kernels.paged_attention import paged_attention
from quire.platforms.cpu_facts import cpu_flags
from tests.attention.mixes import MIXES, make_features, paged_batch
from tests.kernels.test_native import check_shared_prefix

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")

# Around every edge: tiles of 16 rows and 32 inputs, blocks of 32 rows, panels of 32 outputs, an odd number of inputs.
ROWS = [1, 8, 15, 16, 17, 31, 32, 33, 48, 49, 64, 97]
SHAPES = [(32, 32), (64, 96), (31, 33), (33, 31), (1, 1), (2, 40), (67, 100), (576, 64), (95, 16), (96, 17)]
FILES = ("amx.c", "linear.c", "threads.c")


def product(made: ctypes.CDLL):
    function = made.quire_linear_amx
    function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3
    return function


@pytest.fixture(scope="module")
def amx():
    emulated = library("-DQUIRE_EMULATE_AMX", only=FILES)
    assert emulated.quire_amx_start() == native.AMX_STATES.index("works")
    return product(emulated)


@pytest.fixture
def machine_code(tmp_path):
    """The very instructions, done by software where the processor has not got them."""
    trap = tmp_path / "trap.so"
    source = Path(__file__).with_name("tile_trap.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", f"-I{FOLDER}", source, "-o", trap], check=True)
    loaded = ctypes.CDLL(str(trap))
    loaded.trap()
    yield product(native.library())
    loaded.untrap()
    has_amx = {"amx_bf16", "amx_tile"} <= cpu_flags()
    assert has_amx or loaded.trapped() > 500


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def check(function, m, n, k, with_bias):
    generator = torch.Generator().manual_seed(m * 1000003 + n * 1009 + k)
    x, weight, bias = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((m, k), (n, k), (n,)))
    guard = 64  # beyond the output, which must stay as it is
    out = torch.full((m * n + guard,), 7.0, dtype=torch.bfloat16)
    packed = native.pack_linear(weight)
    function(x.data_ptr(), packed.data_ptr(), bias.data_ptr() if with_bias else None, out.data_ptr(), m, n, k)
    wanted = x.float() @ weight.float().T + (bias.float() if with_bias else 0)
    torch.testing.assert_close(out[: m * n].view(m, n).float(), wanted, atol=1e-3 * k**0.5, rtol=8e-3)
    assert (out[m * n :] == 7).all()


@pytest.mark.parametrize("rows", ROWS)
def test_every_edge(amx, rows):
    for k, n in SHAPES:
        check(amx, rows, n, k, with_bias=bool(rows % 2))


@pytest.mark.skipif("avx512_bf16" not in cpu_flags(), reason="needs the bf16 instructions of every AMX processor")
def test_the_machine_code(machine_code):
    for rows in (8, 16, 33, 49):
        for k, n in SHAPES:
            check(machine_code, rows, n, k, with_bias=bool(rows % 2))


def test_random_shapes_on_some_threads(amx, threads):
    rng = random.Random(threads)
    for _ in range(12):
        check(amx, rng.randint(1, 150), rng.randint(1, 300), rng.randint(1, 300), rng.random() < 0.5)


def test_more_rows_than_a_chunk_holds(threads):
    """Chunks of one block: rows are shared out too, and inputs copied anew in the middle of a thread's part."""
    function = product(library("-DQUIRE_EMULATE_AMX", "-DCHUNK_BYTES=1024", only=FILES))
    for m, n, k in ((200, 70, 50), (129, 33, 64), (70, 200, 31)):
        check(function, m, n, k, with_bias=True)


def test_some_panels_at_a_time(threads):
    """Of many blocks of rows; the last panels are fewer, and the next chunk begins with the first again."""
    function = product(library("-DQUIRE_EMULATE_AMX", "-DCHUNK_BYTES=32768", "-DGROUP_BYTES=8192", only=FILES))
    check(function, 600, 150, 33, with_bias=True)


def test_few_panels_and_many_rows_are_shared_by_rows(amx, threads):
    check(amx, 300, 20, 70, with_bias=False)


def test_zeros_and_padding_never_meet_what_lies_beyond(amx):
    """NaN right behind the inputs and the panels: padding is zeros, not whatever follows."""
    m, n, k = 5, 40, 37
    x, weight = torch.ones(m, k), torch.ones(n, k)
    inputs = torch.full((m * k + 4096,), float("nan"), dtype=torch.bfloat16)
    inputs[: m * k] = x.flatten()
    packed = native.pack_linear(weight.bfloat16()).flatten()
    panels = torch.full((len(packed) + 4096,), float("nan"), dtype=torch.bfloat16)
    panels[: len(packed)] = packed
    out = torch.empty(m, n, dtype=torch.bfloat16)
    amx(inputs.data_ptr(), panels.data_ptr(), None, out.data_ptr(), m, n, k)
    assert (out == k).all()


def test_nothing_to_do(amx):
    amx(None, None, None, None, 0, 64, 64)


def test_any_number_of_rows_goes_to_the_tiles(monkeypatch, amx):
    called = []
    original = native.native_function

    def watched(name):
        called.append(name)
        return amx if name == "quire_linear_amx" else original(name)

    monkeypatch.setattr(native, "has_amx", lambda: True)
    monkeypatch.setattr(native, "native_function", watched)
    weight = torch.randn(50, 40).bfloat16()
    packed = native.pack_linear(weight)
    for rows in (1, 7, 70):
        called.clear()
        x = torch.randn(rows, 40).bfloat16()
        ours = native.linear(x, packed, 50, None)
        assert called == ["quire_linear_amx"]
        torch.testing.assert_close(ours.float(), x.float() @ weight.float().T, atol=0.05, rtol=1e-2)


def use_for_attention(monkeypatch, made):
    function = made.quire_attention
    function.argtypes = native.native_function("quire_attention").argtypes
    original = native.native_function
    monkeypatch.setattr(native, "has_amx", lambda: True)
    monkeypatch.setattr(
        native, "native_function", lambda name: function if name == "quire_attention" else original(name)
    )


def check_attention(mix, window, heads, kv_heads, head_size, features=""):
    batch = paged_batch(MIXES[mix], 16, heads, kv_heads, head_size, torch.bfloat16, window)
    layer_features = make_features(features, heads, head_size**-0.5, window)
    ours, wanted = native.attention(*batch, layer_features), paged_attention(*batch, layer_features)
    torch.testing.assert_close(ours.float(), wanted.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("mix", MIXES)
def test_attention(monkeypatch, mix, window):
    use_for_attention(monkeypatch, library("-DQUIRE_EMULATE_AMX", only=(*FILES, "attention.c")))
    for heads, kv_heads, head_size in ((4, 2, 32), (9, 3, 64), (5, 1, 96)):
        check_attention(mix, window, heads, kv_heads, head_size)
    check_attention(mix, window, 6, 2, 32, "all")


def test_attention_to_a_shared_prefix(monkeypatch):
    use_for_attention(monkeypatch, library("-DQUIRE_EMULATE_AMX", only=(*FILES, "attention.c")))
    for features in ("", "all"):
        check_shared_prefix(torch.bfloat16, 35, 96, features)


@pytest.mark.skipif("avx512_bf16" not in cpu_flags(), reason="needs the bf16 instructions of every AMX processor")
def test_the_machine_code_of_attention(monkeypatch, machine_code):
    use_for_attention(monkeypatch, native.library())
    check_attention("mixed", None, 9, 3, 64)


def test_this_machine_is_known_for_what_it_is():
    if not {"amx_bf16", "amx_tile"} & cpu_flags():
        assert native.AMX_STATES[native.library().quire_amx_start()] == "not there"
        assert not native.has_amx()
    assert native.describe() == f"{'amx' if native.has_amx() else native.linear_kind()} kernels"


def test_instructions_that_are_not_there_end_only_the_trial():
    """Nor those that are there, as long as the process has not asked for permission."""
    unchecked = library("-DQUIRE_AMX_UNCHECKED", only=FILES)
    child = "import ctypes, torch, sys; print(ctypes.CDLL(sys.argv[1]).quire_amx_start())"
    done = subprocess.run(
        [sys.executable, "-c", child, os.path.realpath(unchecked._name)], capture_output=True, text=True
    )
    assert native.AMX_STATES[int(done.stdout)] == "died in a trial"


@pytest.mark.parametrize("state", ["needs a newer compiler", "died in a trial", "gave wrong results in a trial"])
def test_a_failed_trial_is_told_and_avoided(monkeypatch, caplog, state):
    monkeypatch.setattr(native, "native_function", lambda name: lambda: native.AMX_STATES.index(state))
    monkeypatch.setattr(native, "cpu_flags", lambda: frozenset({"amx_bf16"}))
    with caplog.at_level("WARNING", logger="quire"):
        assert not native.has_amx.__wrapped__()
    assert f"AMX {state}; AVX-512 kernels serve instead" in caplog.text


def test_an_assembler_without_amx_leaves_it_out():
    without = library(SECOND_TRY["amx.c"], only=FILES)
    assert native.AMX_STATES[without.quire_amx_start()] == "needs a newer compiler"
