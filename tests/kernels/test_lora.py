"""Low-rank terms in C, and the torch reference against merged weights."""

import pytest
import torch

from quire.kernels import native
from quire.kernels.lora import LowRank, add_low_rank, add_low_rank_torch
from quire.kernels.native.replay import Recording
from tests.kernels import lora_cases

needs_compiler = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", lora_cases.SLOTS)
@pytest.mark.parametrize("layer", lora_cases.LAYERS)
def test_low_rank_terms(layer, slots, dtype):
    lora_cases.check(layer, slots, "cpu", dtype)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_smaller_ranks_than_the_highest(dtype):
    """Slots are padded with zeros; laid out as layers have them."""
    a, b, x, out, of_rows = lora_cases.make("query, key, value", "mixed", "cpu", dtype)
    ranks = torch.tensor([5, 3, 1], dtype=torch.int32)
    for slot, rank in enumerate(ranks.tolist()):
        b[slot, :, rank:] = 0
        a[slot].view(3, 5, -1)[:, rank:] = 0
    wanted = out.clone()
    w = LowRank(a, b.transpose(1, 2).contiguous().transpose(1, 2), (128, 160, 192), ranks)
    add_low_rank_torch(wanted, x, of_rows, w)
    add_low_rank(out, x, of_rows, w)
    exact = dtype is torch.float32
    torch.testing.assert_close(out, wanted, atol=2e-5 if exact else 2e-2, rtol=1e-4 if exact else 2e-2)


@needs_compiler
def test_it_is_replayed():
    """As layers lay it out, torch has nothing to do, which could not be recorded."""
    a, b, x, out, of_rows = lora_cases.make("query, key, value", "mixed", "cpu", torch.float32)
    w = LowRank(a, b.transpose(1, 2).contiguous().transpose(1, 2), (128, 160, 192), lora_cases.ranks_of(b))
    with Recording(len(x)) as recording:
        add_low_rank(out, x, of_rows, w)
    assert [call.kind for call in recording.calls] == ["add_low_rank"]


@needs_compiler
@pytest.mark.parametrize("slots", lora_cases.SLOTS)
@pytest.mark.parametrize("layer", lora_cases.LAYERS)
def test_replayed_beside_their_product(layer, slots):
    """Which fetches the factors: the bits are those of the two calls, and a slot of rank 0 has none."""
    a, b, x, out, of_rows = lora_cases.make(layer, slots, "cpu", torch.bfloat16)
    ends = tuple(torch.tensor(lora_cases.LAYERS[layer][1]).cumsum(0).tolist())
    ranks = torch.tensor([b.shape[2], b.shape[2] - 2, 0], dtype=torch.int32)
    w = LowRank(a, b.transpose(1, 2).contiguous().transpose(1, 2), ends, ranks)
    packed = native.pack_linear(torch.randn(out.shape[1], x.shape[1], dtype=torch.bfloat16))
    wanted = native.linear(x, packed, out.shape[1], None)
    before = wanted.clone()
    add_low_rank(wanted, x, of_rows, w)
    with Recording(len(x)) as recording:
        found = native.linear(x, packed, out.shape[1], None)
        add_low_rank(found, x, of_rows, w)
    recording.replayed()(len(x), len(x), 0)
    assert torch.equal(found, wanted)
    own = of_rows[: len(x)]
    without = (own < 0) | (ranks[own.clamp(min=0).long()] == 0)
    assert torch.equal(found[without], before[without])
    assert without.all() or not torch.equal(found[~without], before[~without])


@needs_compiler
def test_an_infinite_weight_stays_with_its_rows():
    lora_cases.check_an_infinite_weight_stays_with_its_rows("cpu", torch.float32)


@needs_compiler
def test_rank_0_leaves_outputs_as_they_are():
    lora_cases.check_rank_0_leaves_outputs_as_they_are("cpu", torch.float32)


def test_slots_of_tokens():
    lora_cases.check_slots_of_tokens("cpu")


def test_the_reference_is_a_merged_weight():
    a, b, x, _, of_rows = lora_cases.make("query, key, value", "mixed", "cpu", torch.float32)
    weight = torch.randn(192, 130)
    out = x @ weight.T
    add_low_rank_torch(out, x, of_rows, LowRank(a, b, (128, 160, 192), lora_cases.ranks_of(b)))
    for row, slot in enumerate(of_rows[: len(x)].tolist()):
        merged = weight.clone()
        for i, part in enumerate((slice(0, 128), slice(128, 160), slice(160, 192))):
            merged[part] += b[slot, part] @ a[slot, 5 * i : 5 * i + 5] if slot >= 0 else 0
        torch.testing.assert_close(out[row], merged @ x[row])
