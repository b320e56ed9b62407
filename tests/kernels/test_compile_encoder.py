"""Attention without a cache compiled for a Hopper device without one."""

import pytest

pytest.importorskip("triton")
from quire.kernels.dispatch import INTERPRETED
from quire.kernels.triton.encoder_attention import _encoder_attention_kernel
from tests.kernels.test_compile import FLOAT, HALF, INT, compiled

pytestmark = pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted")
NUMBERS = ("num_tokens", "q_stride", "k_stride", "v_stride", "out_stride", "longest")


@pytest.mark.parametrize(("head_size", "window", "bias"), [(32, 0, False), (64, 65, True), (256, 0, False)])
def test_attention(head_size, window, bias):
    types = dict.fromkeys(("q", "k", "v", "out"), HALF) | dict.fromkeys(NUMBERS, "i32")
    types |= {"spans": INT, "bias": FLOAT, "scale": "fp32"}
    constants: dict[str, object] = {"D": head_size, "DP": head_size, "GROUP": 1, "WINDOW": window, "HAS_BIAS": bias}
    constants |= {"M": 64, "TILE": 64} | ({} if bias else {"bias": None})
    assert "wgmma" in compiled(_encoder_attention_kernel, types, constants).asm["ptx"]
