import torch
from torch import nn

from quire.attention.base import ForwardContext, StepInputs
from quire.attention.torch import TorchBackend
from quire.kernels.paged_attention import AttentionFeatures, paged_attention
from quire.layers.attention import Attention

HEADS, KV, D, BLOCK = 4, 2, 8, 4


def bound(attention, num_blocks=8):
    backend = TorchBackend()
    attention.bind([torch.zeros(num_blocks, 2, KV, BLOCK, D)], 0, backend)
    return attention


def context(attention, tokens):
    """One row, whose tokens fill blocks 3, 1, 2 in that order."""
    table = torch.tensor([[3, 1, 2]], dtype=torch.int32)
    at = torch.arange(tokens)
    slots = table[0][at // BLOCK].long() * BLOCK + at % BLOCK
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    step = StepInputs(torch.tensor([0]), tokens, starts, starts[1:], decode_only=False)
    return ForwardContext(step, [attention.backend.build(step, table, BLOCK)], [slots])


@torch.no_grad()
def test_it_sees_sinks_that_are_loaded_later():
    torch.manual_seed(0)
    sinks, slopes = nn.Parameter(torch.zeros(HEADS)), torch.rand(HEADS)
    attention = bound(Attention(0, HEADS, KV, D, 0.3, softcap=2, slopes=slopes, sinks=sinks))
    q, k, v = torch.randn(10, HEADS + 2 * KV, D).split((HEADS, KV, KV), dim=1)
    for value in (0.0, 4.0):
        sinks.fill_(value)
        ctx = context(attention, 10)
        ours = attention.forward_heads(q, k, v, ctx)
        wanted = paged_attention(
            q, attention.kv_cache, ctx.step.rows, ctx.step.query_start, ctx.step.seq_lens, ctx.metadata[0].block_table,
            AttentionFeatures(0.3, None, 2.0, slopes, torch.full((HEADS,), value)),
        )  # fmt: skip
        torch.testing.assert_close(ours, wanted.flatten(1))


def test_only_sinks_are_part_of_the_state():
    attention = Attention(0, HEADS, KV, D, 0.3, slopes=torch.rand(HEADS), sinks=nn.Parameter(torch.zeros(HEADS)))
    assert list(attention.state_dict()) == ["sinks"]
    assert not Attention(0, HEADS, KV, D, 0.3).state_dict()


def test_kinds_differ_in_what_kernels_are_compiled_for():
    ones = torch.ones(HEADS)
    layers = [
        Attention(0, HEADS, KV, D, 0.3),
        Attention(0, HEADS, KV, D, 0.3, 16),
        Attention(0, HEADS, KV, D, 0.3, softcap=30.0),
        Attention(0, HEADS, KV, D, 0.3, slopes=ones),
        Attention(0, HEADS, KV, D, 0.3, sinks=nn.Parameter(ones)),
        Attention(0, HEADS, KV, D, 0.3, causal=False),
        Attention(0, HEADS, 1, D, 0.3),
        Attention(0, HEADS, KV, 16, 0.3),
    ]
    assert len({layer.kind for layer in layers}) == len(layers)
    assert Attention(0, HEADS, KV, D, 0.3, slopes=ones).kind == Attention(5, HEADS, KV, D, 0.1, slopes=2 * ones).kind
