import pytest
import torch

import tests.kernels.interpreter_fix  # noqa: F401
from quire.kernels.paged_attention import AttentionShape
from quire.kernels.triton import paged_decode
from quire.kernels.triton.paged_decode import DecodeWorkspace, Tuning
from tests.attention.mixes import FEATURES
from tests.kernels.kernel_cases import (
    MIXES,
    check_activations,
    check_attention,
    check_layer_norms,
    check_norms,
    check_prepare_inputs,
    check_rope_and_write,
    check_scaled_write,
    check_silu_mul,
    check_split_decode,
)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Hundreds of programs, as on a GPU, most without work, would take the interpreter ten seconds."""
    monkeypatch.setattr(paged_decode, "FLOAT32", Tuning(tile=32, stages=2, programs=64))
    monkeypatch.setattr(Tuning, "programs", 64)


# Every mix with every window, by turns of a key head per head and of groups.
TURNS = [
    (mix, window, *((4, 4) if (i + j) % 2 else (6, 2)))
    for i, mix in enumerate(MIXES)
    for j, window in enumerate((None, 6, 40))
]


@pytest.mark.parametrize(("mix", "window", "heads", "kv_heads"), TURNS)
def test_attention(mix, window, heads, kv_heads):
    check_attention(mix, "cpu", heads=heads, kv_heads=kv_heads, window=window)


def test_a_head_size_that_is_no_power_of_two_and_small_blocks():
    check_attention("mixed", "cpu", head_size=24, block_size=8)


@pytest.mark.parametrize("prefix", [16, 64, 208])
def test_a_shared_prefix(prefix):
    check_attention("decode", "cpu", prefix=prefix, padding=2)


@pytest.mark.parametrize("features", FEATURES)
def test_a_shared_prefix_with(features):
    check_attention("decode", "cpu", prefix=64, padding=2, features=features)


@pytest.mark.parametrize("features", ["", "all"])
def test_padding_rows_stay_finite(features):
    check_attention("decode", "cpu", padding=3, features=features)


@pytest.mark.parametrize(("mix", "window"), [("decode", 6), ("mixed", None)])
@pytest.mark.parametrize("features", FEATURES)
def test_features(mix, window, features):
    check_attention(mix, "cpu", heads=6, window=window, features=features)


@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(71, 1, 16), (2, 1, 256), (3, 3, 96)])
def test_large_groups_and_heads(heads, kv_heads, head_size):
    check_attention("mixed", "cpu", heads=heads, kv_heads=kv_heads, head_size=head_size, features="all")
    check_attention("decode", "cpu", heads=heads, kv_heads=kv_heads, head_size=head_size, prefix=32)


@pytest.mark.parametrize("mix", ["decode", "mixed"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (12, 2), (8, 8)])
def test_layers_of_several_shapes_share_a_backend(mix, heads, kv_heads):
    others = tuple(AttentionShape(*shape) for shape in ((2, 2, 16), (12, 2, 16), (8, 8, 16)))
    check_attention(mix, "cpu", heads=heads, kv_heads=kv_heads, other_layers=others)


def test_a_workspace_holds_the_largest_layer_whichever_is_first():
    small, many_heads, large_heads = AttentionShape(2, 1, 16), AttentionShape(16, 8, 16), AttentionShape(2, 1, 64)
    each = [DecodeWorkspace(4, [shape], torch.device("cpu")) for shape in (small, many_heads, large_heads)]
    shared = DecodeWorkspace(4, [small, many_heads, large_heads], torch.device("cpu"))
    for name in ("partial_out", "partial_sum", "arrived"):
        assert len(getattr(shared, name)) == max(len(getattr(space, name)) for space in each)


@pytest.mark.parametrize("min_tiles", [1, 4])
@pytest.mark.parametrize("programs", [1, 40, 8192])
def test_splits_of_any_size(min_tiles, programs):
    check_split_decode("cpu", torch.float32, Tuning(32, min_tiles=min_tiles, programs=programs))


def test_splits_with_features():
    check_split_decode("cpu", torch.float32, Tuning(32, programs=40), "all")


@pytest.mark.parametrize("width", [64, 576])
def test_norms(width):
    check_norms("cpu", torch.float32, 5, width)


def test_layer_norms():
    for width in (64, 576):
        check_layer_norms("cpu", torch.float32, 5, width)


def test_activations():
    check_silu_mul("cpu", torch.float32, 3, 1500)
    check_activations("cpu", torch.float32, 3, 1500)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary"), [(16, 16), (16, 8), (24, 24), (24, 0)])
def test_rope_and_write(normed, head_dim, rotary):
    check_rope_and_write("cpu", torch.float32, 7, 6, 2, head_dim, rotary, normed)


@pytest.mark.parametrize("decode_only", [True, False])
def test_prepare_inputs(decode_only):
    check_prepare_inputs("cpu", decode_only)


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("mix", ["mixed", "long"])
def test_a_cache_with_a_scale_per_token_and_head(mix, cache_dtype):
    check_attention(mix, "cpu", cache_dtype=cache_dtype, scales="token", features="all")
    check_attention(mix, "cpu", head_size=24, block_size=8, cache_dtype=cache_dtype, scales="token", window=20)
    check_attention("decode", "cpu", cache_dtype=cache_dtype, scales="token", prefix=64, padding=2)


def test_a_cache_with_a_scale_per_layer():
    for mix in ("mixed", "long"):
        check_attention(mix, "cpu", cache_dtype=torch.float8_e4m3fn, scales="layer", features="all")
    check_attention("decode", "cpu", cache_dtype=torch.float8_e4m3fn, scales="layer", prefix=64, padding=2)


@pytest.mark.parametrize(("head_dim", "rotary"), [(16, 16), (24, 8), (16, 0)])
def test_writing_a_quantized_cache(head_dim, rotary):
    """In fp8 only on a GPU: the interpreter does not carry when it rounds."""
    check_scaled_write("cpu", torch.float32, torch.int8, head_dim, rotary, "token")
