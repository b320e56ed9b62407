"""The C kernels against their torch twins."""

import platform

import numpy as np
import pytest
import torch

from quire.kernels import native
from quire.kernels.activation import ACTIVATIONS, activate, activate_mul, activate_mul_torch, activate_torch
from quire.kernels.layer_norm import layer_norm_torch
from quire.kernels.paged_attention import AttentionFeatures, paged_attention
from quire.kernels.prepare_inputs import prepare_inputs, prepare_inputs_torch
from quire.kernels.rms_norm import fused_add_rms_norm_torch, rms_norm_torch
from quire.kernels.rope_and_write import rope_and_write_torch
from quire.kernels.silu_mul import silu_mul_torch
from quire.platforms.cpu_facts import cpu_flags
from tests.attention.mixes import FEATURES, MIXES, make_features, paged_batch

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")

DTYPES = [torch.float32, torch.bfloat16]
PLAIN = AttentionFeatures(0.125)

# What quire_linear is compiled as, and the flags that make this machine one without more. Those it has less than, it
# cannot run.
LINEARS: dict[str, tuple[str, ...]] = {"this machine": ()}
if platform.machine() == "x86_64":
    LINEARS["portable"] = ("-march=x86-64",)
    if {"avx2", "fma", "bmi2"} <= cpu_flags():
        LINEARS["avx2"] = ("-march=haswell",)
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"} <= cpu_flags():
        LINEARS["avx512"] = ("-march=skylake-avx512",)


def check_close(ours, wanted, dtype):
    exact = dtype is torch.float32
    torch.testing.assert_close(ours.float(), wanted.float(), atol=2e-5 if exact else 2e-2, rtol=1e-4 if exact else 2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (3, 65), (70, 1024)])
def test_rms_norm(dtype, rows, width):
    x, residual, weight = torch.randn(2 * rows + 1, width).to(dtype).split((rows, rows, 1))
    weight = weight[0].float()
    check_close(native.rms_norm(x, None, weight, 1e-6), rms_norm_torch(x, weight, 1e-6), dtype)
    wanted, total = fused_add_rms_norm_torch(x, residual, weight, 1e-6)
    stream = residual.clone()
    check_close(native.rms_norm(x, stream, weight, 1e-6), wanted, dtype)
    assert torch.equal(stream, total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (3, 65), (70, 1024)])
def test_layer_norm(dtype, has_bias, rows, width):
    x, residual = (torch.randn(2, rows, width) + 3).to(dtype)
    weight, shift = torch.randn(2, width)
    bias = shift if has_bias else None
    check_close(native.layer_norm(x, None, weight, bias, 1e-5), layer_norm_torch(x, weight, bias, 1e-5), dtype)
    stream, total = residual.clone(), x + residual
    check_close(native.layer_norm(x, stream, weight, bias, 1e-5), layer_norm_torch(total, weight, bias, 1e-5), dtype)
    assert torch.equal(stream, total)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add(dtype):
    x, y = torch.randn(2, 5, 70).to(dtype)
    assert torch.equal(native.add(x, y), x + y)
    table, rows = torch.randn(9, 70).to(dtype), torch.tensor([6, 0, 3, 3, 1])
    assert torch.equal(native.add_rows(x, table, rows, first=2), x + table[rows + 2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activate(dtype, name):
    x = (torch.randn(7, 2 * 300) * 8).to(dtype)
    check_close(activate(x, name), activate_torch(x.float(), name), dtype)
    check_close(activate_mul(x, name), activate_mul_torch(x.float(), name), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1536), (40, 600)])
def test_silu_mul(dtype, rows, width):
    x = (torch.randn(rows, 2 * width) * 8).to(dtype)
    check_close(native.silu_mul(x), silu_mul_torch(x.clone()), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "rotary"), [(9, 3, 64, 64), (4, 4, 24, 12), (6, 2, 96, 96)])
def test_rope_and_write(dtype, normed, heads, kv_heads, head_dim, rotary):
    tokens, blocks = 37, 5
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim).to(dtype)
    angles = torch.rand(64, rotary // 2) * 6
    table = torch.cat((angles.cos(), angles.sin()), 1).to(dtype)
    positions, slots = torch.randint(0, 64, (tokens,)), torch.randperm(blocks * 16)[:tokens]
    weights = torch.randn(2, head_dim)
    norms = (weights[0], weights[1], 1e-6) if normed else None
    caches = [torch.zeros(blocks, 2, kv_heads, 16, head_dim, dtype=dtype) for _ in range(2)]
    wanted = rope_and_write_torch(qkv, heads, norms, table, positions, caches[0], slots)
    check_close(native.rope_and_write(qkv, heads, norms, table, positions, caches[1], slots), wanted, dtype)
    check_close(caches[1], caches[0], dtype)


@pytest.fixture(params=LINEARS)
def linear_of(request, monkeypatch):
    """`native.linear` compiled for a lesser machine too."""
    kind, flags = request.param, LINEARS[request.param]
    made = native.library(*flags, only=("linear.c", "threads.c")) if flags else native.library()
    assert kind == "this machine" or native.LINEAR_KINDS[made.quire_linear_kind()] == kind
    monkeypatch.setattr(native, "has_amx", lambda: False)
    monkeypatch.setattr(
        native, "native_function", lambda name: with_types(getattr(made, name), native._SIGNATURES[name])
    )
    return native.linear


def with_types(function, signature):
    function.argtypes = [native._KINDS[kind] for kind in signature.replace(" ", "")]
    return function


@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax(dtype):
    for rows, width in [(1, 1), (3, 7), (2, 256), (5, 257), (64, 49152)]:
        torch.manual_seed(width)
        x = torch.randn(rows, width).to(dtype)
        best = x.float().max(1, keepdim=True).values
        first = torch.where(x.float() == best, torch.arange(width), width).min(1).values  # bf16 has many equals
        assert torch.equal(native.argmax(x), first)
        x[0, width // 2] = float("nan")
        x[-1] = float("-inf")
        found = native.argmax(x)
        assert found[-1] == 0 and (rows == 1 or found[0] == width // 2)


@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(linear_of, with_bias):
    torch.manual_seed(0)
    for k, n in [(576, 1536), (64, 32), (33, 7), (10, 50), (1024, 96), (1, 1)]:
        weight, bias = torch.randn(n, k).bfloat16(), torch.randn(n).bfloat16() if with_bias else None
        packed = native.pack_linear(weight)
        for rows in [1, 2, 3, 5, 8, 12, 13, 64, 200]:
            x = torch.randn(rows, k).bfloat16()
            wanted = x.float() @ weight.float().T + (bias.float() if with_bias else 0)
            ours = linear_of(x, packed, n, bias)
            torch.testing.assert_close(ours.float(), wanted, atol=1e-3 * k**0.5, rtol=8e-3)


def test_linear_keeps_what_is_not_a_number(linear_of):
    x, weight = torch.ones(3, 40).bfloat16(), torch.ones(5, 40).bfloat16()
    x[1, 7] = float("nan")
    x[2, 3] = float("inf")
    out = linear_of(x, native.pack_linear(weight), 5, None)
    assert (out[0] == 40).all() and out[1].isnan().all() and (out[2] == float("inf")).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("window", [None, 1, 6, 40, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(9, 3, 64), (4, 4, 24), (6, 2, 128), (32, 1, 32)])
def test_attention(dtype, mix, window, heads, kv_heads, head_size):
    batch = paged_batch(MIXES[mix], 16, heads, kv_heads, head_size, dtype, window)
    layer_features = AttentionFeatures(head_size**-0.5, window)
    check_close(native.attention(*batch, layer_features), paged_attention(*batch, layer_features), dtype)


@pytest.mark.parametrize("block_size", [1, 7, 32])
def test_attention_with_other_blocks(block_size):
    batch = paged_batch(MIXES["mixed"], block_size, 6, 2, 64, torch.bfloat16)
    check_close(native.attention(*batch, PLAIN), paged_attention(*batch, PLAIN), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "shared"), [(9, 32), (70, 192), (3, 64), (64, 16)])
@pytest.mark.parametrize("features", ["", *FEATURES])
def test_a_prefix_that_all_rows_share(dtype, rows, shared, features):
    check_shared_prefix(dtype, rows, shared, features)


def check_shared_prefix(dtype, rows, shared, features=""):
    lengths = [(shared + 5 * i % 77, 1) for i in range(rows)]
    q, cache, places, starts, lens, table = paged_batch(lengths, 16, 9, 3, 64, dtype)
    table[:, : shared // 16] = table[places[0], : shared // 16].clone()
    batch = (q, cache, places, starts, lens, table)
    layer_features = make_features(features, 9, 0.125)
    check_close(native.attention(*batch, layer_features, shared=shared), paged_attention(*batch, layer_features), dtype)


def test_one_thread_gives_the_same():
    batch = paged_batch(MIXES["long"], 16, 6, 2, 64, torch.bfloat16)
    several = native.attention(*batch, PLAIN)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(native.attention(*batch, PLAIN), several)
    finally:
        torch.set_num_threads(threads)


def test_random_shapes():
    rng = np.random.default_rng(0)
    for _ in range(30):
        rows = [(int(rng.integers(0, 200)), int(rng.integers(1, 40))) for _ in range(rng.integers(1, 6))]
        batch = paged_batch(rows, 16, 6, 2, 64, torch.bfloat16)
        check_close(native.attention(*batch, PLAIN), paged_attention(*batch, PLAIN), torch.bfloat16)


@pytest.mark.parametrize("heads", [4, 16], ids=["one by one", "packed"])
def test_a_query_of_nan_stays_nan_and_alone(heads):
    q = torch.randn(3, heads, 64).bfloat16()
    q[1] = torch.nan
    cache = torch.randn(25, 2, 1, 16, 64).bfloat16()
    rows, starts = torch.arange(3), torch.arange(4).int()
    table = torch.arange(1, 25).view(3, 8).int()
    out = native.attention(q, cache, rows, starts, torch.full((3,), 100).int(), table, AttentionFeatures(0.125))
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("shift", [0, 1], ids=["as they are", "shifted, as draft heads read them"])
@pytest.mark.parametrize("counts", [[1] * 5, [3, 1, 40, 1, 7]])
def test_prepare_inputs(counts, shift):
    rng = np.random.default_rng(0)
    rows, starts = torch.tensor([4, 0, 7, 2, 5], dtype=torch.int32), torch.tensor([0, *np.cumsum(counts)]).int()
    token_rows = None if max(counts) == 1 else torch.from_numpy(np.repeat(np.arange(5, dtype=np.int32), counts))
    token_ids = torch.from_numpy(rng.integers(0, 1000, (9, 96 + shift), dtype=np.int32))[:, shift:]
    tables = [torch.from_numpy(rng.integers(1, 99, (9, 96 // size), dtype=np.int32)) for size in (16, 32)]
    computed = torch.from_numpy(rng.integers(0, 50, 9))
    states = [computed.clone(), computed.clone()]
    ours, theirs = (
        prepare(rows, starts, token_rows, token_ids, state, tables, [16, 32])
        for prepare, state in zip((prepare_inputs, prepare_inputs_torch), states, strict=True)
    )
    assert torch.equal(*states)
    assert torch.equal(ours.input_ids, theirs.input_ids) and torch.equal(ours.positions, theirs.positions)
    assert all(map(torch.equal, ours.slot_mapping, theirs.slot_mapping))
    assert torch.equal(ours.seq_lens, theirs.seq_lens)


def test_padding_is_no_row():
    rows, starts, computed = torch.tensor([1, -1, -1]).int(), torch.arange(4).int(), torch.tensor([3, 5])
    table = torch.tensor([[7], [8]]).int()
    found = prepare_inputs(rows, starts, None, torch.arange(32).view(2, 16).int(), computed, [table], [16])
    assert found.input_ids.tolist() == [21, 0, 0] and found.positions.tolist() == [5, 0, 0]
    assert found.slot_mapping[0].tolist() == [8 * 16 + 5, 0, 0]
    assert found.seq_lens.tolist() == [6, 0, 0] and computed.tolist() == [3, 6]


@pytest.mark.parametrize("position", [16, -1])
def test_prepare_inputs_refuses_what_is_outside_of_a_row(position):
    rows, starts, computed = torch.zeros(1).int(), torch.tensor([0, 1]).int(), torch.tensor([position])
    state = (torch.zeros(1, 16).int(), computed, [torch.zeros(1, 1).int()], [16])
    with pytest.raises(ValueError, match="sizes"):
        prepare_inputs(rows, starts, None, *state)
    assert computed.tolist() == [position]
