"""Threads that take blocks of tokens through a recorded step's calls have the bits of the calls made one by one."""

import ctypes

import pytest
import torch

from quire.kernels import native
from quire.kernels.activation import silu_mul
from quire.kernels.native.replay import Recording
from quire.kernels.native.replay_blocks import Life, NotedCall, place_in_blocks

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")

HIDDEN = 40
BF16_LINEAR = native.library() is not None and not native.has_amx()


class Layer:
    """Norm, gates and what they gate, and a product: all that lies between two attentions."""

    def __init__(self, inner, bias):
        torch.manual_seed(0)
        self.inner = inner
        self.norm, self.bias = torch.rand(HIDDEN), torch.randn(2 * inner).bfloat16() if bias else None
        self.gate_up = native.pack_linear(torch.randn(2 * inner, HIDDEN).bfloat16())
        self.down = native.pack_linear(torch.randn(HIDDEN, inner).bfloat16())

    def __call__(self, x, keep=False):
        gate_up = native.linear(native.rms_norm(x, None, self.norm, 1e-5), self.gate_up, 2 * self.inner, self.bias)
        gated = silu_mul(gate_up)
        kept = gate_up if keep else None
        del gate_up
        return native.linear(gated, self.down, HIDDEN, None), kept


def many():
    """Tokens that are worth blocks; the last block is not full."""
    return 3 * 96 * torch.get_num_threads() + 101


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("inner", [64, 96, 40])
def test_the_bits_of_calls_made_one_by_one(inner, bias, keep):
    layer, x = Layer(inner, bias), torch.randn(many(), HIDDEN).bfloat16()
    with Recording(len(x)) as recording:
        out, kept = layer(x, keep)
        out, _ = layer(out)
    replay = recording.replayed()
    for _ in range(2):
        replay(len(x), 1, 0)
        expected, expected_kept = layer(x, keep)
        assert torch.equal(out, layer(expected)[0])
        assert kept is None or torch.equal(kept, expected_kept)
        x.copy_(torch.randn(x.shape))


@pytest.mark.skipif(not BF16_LINEAR, reason="blocks are of plain bf16 products")
def test_what_is_used_up_inside_is_not_written_for_all_tokens():
    layer, x = Layer(64, True), torch.randn(many(), HIDDEN).bfloat16()
    with Recording(len(x)) as recording:
        out, _ = layer(x)
    replay = recording.replayed()
    pieces = recording._memory.places()
    for address, nbytes in pieces:
        ctypes.memset(address, 7, nbytes)
    replay(len(x), 1, 0)
    written = [set(ctypes.string_at(address, nbytes)) != {7} for address, nbytes in pieces]
    assert written == [address == out.data_ptr() for address, _ in pieces]


def test_a_result_that_is_read_after_the_blocks_is_where_it_was():
    layer, x = Layer(64, False), torch.randn(many(), HIDDEN).bfloat16()
    with Recording(len(x)) as recording:
        out, _ = layer(x)
    attention = NotedCall("attention", bytes(8 * 27))
    lives = [life for life in recording._lives if life.died > life.born]
    later = [Life(life.address, life.nbytes, life.born, len(recording.calls) + 1) for life in lives]
    assert place_in_blocks(recording.calls, lives, len(out)) is not None
    assert place_in_blocks([*recording.calls, attention], later, len(out)) is None


def test_a_tensor_of_which_a_part_is_read_is_where_it_was():
    x, weight = torch.randn(many(), HIDDEN).bfloat16(), torch.ones(HIDDEN)
    with Recording(len(x)) as recording:
        inner = native.rms_norm(x, None, weight, 1e-5)
        out = native.rms_norm(inner[:, 8:], None, weight, 1e-5)
        del inner
    assert place_in_blocks(recording.calls, recording._lives, len(out)) is None
