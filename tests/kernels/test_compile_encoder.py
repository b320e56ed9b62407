"""Attention without a cache, compiled for a Hopper device without one."""

import pytest
import torch

pytest.importorskip("triton")
from quire.kernels.dispatch import INTERPRETED
from quire.kernels.encoder_attention import EncoderFeatures
from quire.kernels.paged_attention import AttentionShape
from quire.kernels.triton.encoder_attention import encoder_attention
from tests.kernels.launched import launched

pytestmark = pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("head_size", "window", "bias"),
    [(32, None, False), (64, 65, True), (128, None, True), (256, None, False), (256, 65, True), (512, None, True)],
)
def test_attention(monkeypatch, dtype, head_size, window, bias):
    shape = AttentionShape(4, 2, head_size)
    features = EncoderFeatures(shape, 1.0, window, torch.zeros(4, 1023) if bias else None)
    qkv, start = torch.zeros(100, 8 * head_size, dtype=dtype), torch.tensor([0, 100], dtype=torch.int32)
    found = launched(monkeypatch, lambda: encoder_attention(qkv, start, features))
    (attention,) = (one for one in found if one.name == "_encoder_attention_kernel")
    assert attention.fits, attention.kernel.metadata.shared
    assert dtype is torch.float32 or head_size > 256 or "wgmma" in attention.kernel.asm["ptx"]
