"""Cases of attention without a cache, against its torch version: for C, Triton's interpreter and GPUs."""

from dataclasses import dataclass

import torch

from quire.kernels.encoder_attention import EncoderFeatures, encoder_attention, encoder_attention_torch
from quire.kernels.paged_attention import AttentionShape

LENGTHS = {"one": [1], "short": [16, 3, 1, 40, 5, 12, 13], "long": [300, 2, 700], "empty": [0, 33, 0, 64, 0]}


@dataclass(frozen=True)
class Case:
    heads: int = 4
    kv_heads: int = 4
    head_size: int = 32
    window: int | None = None
    bias: bool = False
    rotary: int = 0
    norms: bool = False


CASES = {
    "plain": Case(),
    "grouped": Case(heads=6, kv_heads=2, head_size=64),
    "large heads": Case(heads=2, kv_heads=1, head_size=256, rotary=256, norms=True),
    "odd sizes": Case(heads=3, kv_heads=3, head_size=40, window=5),
    "window": Case(window=20, rotary=32),
    "bias": Case(head_size=16, bias=True),
    "large heads and bias": Case(heads=2, kv_heads=2, head_size=256, bias=True),
    "partly rotated": Case(head_size=64, rotary=32),
}
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def check(case: str, lengths: str, device: str, dtype: torch.dtype, padding: int = 0) -> None:
    c, counts = CASES[case], LENGTHS[lengths]
    torch.manual_seed(0)
    tokens, longest = sum(counts) + padding, 1024
    start = torch.tensor([0, *counts]).cumsum(0).int()
    qkv = torch.randn(tokens, (c.heads + 2 * c.kv_heads) * c.head_size).to(device, dtype)
    bias = torch.randn(c.heads, 2 * longest - 1).to(device) if c.bias else None
    shape = AttentionShape(c.heads, c.kv_heads, c.head_size)
    features = EncoderFeatures(shape, c.head_size**-0.5, c.window, bias)
    norms = (torch.rand(c.head_size).to(device), torch.rand(c.head_size).to(device), 1e-6) if c.norms else None
    angles = torch.rand(longest, c.rotary // 2) * 6
    table = torch.cat((angles.cos(), angles.sin()), 1).to(device, dtype) if c.rotary else None
    positions = torch.cat([*(torch.arange(n) for n in counts), torch.zeros(padding, dtype=torch.int64)]).to(device)
    arguments = (start.to(device), features, norms, table, positions)
    found = encoder_attention(qkv, *arguments)
    wide = table.float() if table is not None else None
    expected = encoder_attention_torch(qkv.float(), *arguments[:3], wide, positions)
    assert found.shape == expected.shape and found.dtype is dtype
    assert (found.float() - expected).abs().max() < TOLERANCES[dtype]
