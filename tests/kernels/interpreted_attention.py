import pytest
import torch

import tests.kernels.interpreter_fix  # noqa: F401
from quire.kernels.triton.paged_decode import Tuning
from tests.kernels.kernel_cases import (
    MIXES,
    check_attention,
    check_norms,
    check_prepare_inputs,
    check_rope_and_write,
    check_silu_mul,
    check_split_decode,
)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("window", [None, 6, 40])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_attention(mix, window, heads, kv_heads):
    check_attention(mix, "cpu", heads=heads, kv_heads=kv_heads, window=window)


def test_a_head_size_that_is_no_power_of_two_and_small_blocks():
    check_attention("mixed", "cpu", head_size=24, block_size=8)


@pytest.mark.parametrize("prefix", [16, 64, 208])
def test_a_shared_prefix(prefix):
    check_attention("decode", "cpu", prefix=prefix, padding=2)


def test_padding_rows_stay_finite():
    check_attention("decode", "cpu", padding=3)


@pytest.mark.parametrize("min_tiles", [1, 4])
@pytest.mark.parametrize("programs", [1, 40, 8192])
def test_splits_of_any_size(min_tiles, programs):
    check_split_decode("cpu", torch.float32, Tuning(32, min_tiles=min_tiles, programs=programs))


@pytest.mark.parametrize("width", [64, 576])
def test_norms(width):
    check_norms("cpu", torch.float32, 5, width)


def test_silu_mul():
    check_silu_mul("cpu", torch.float32, 3, 1500)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary"), [(16, 16), (16, 8), (24, 24)])
def test_rope_and_write(normed, head_dim, rotary):
    check_rope_and_write("cpu", torch.float32, 7, 6, 2, head_dim, rotary, normed)


@pytest.mark.parametrize("one_each", [True, False])
def test_prepare_inputs(one_each):
    check_prepare_inputs("cpu", one_each)
