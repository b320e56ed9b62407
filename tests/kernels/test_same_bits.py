"""A query's attention has the same bits however it is computed: in a prompt, in a chunk, alone, after shared keys."""

import pytest
import torch

from quire.kernels import native
from tests.attention.mixes import make_features, paged_batch

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")

LENGTH = 2600
ALONE = (0, 1, 15, 63, 64, 127, 1023, 1024, 1025, 1500, 2047, 2048, 2049, 2599)
CHUNKS = ((5, 300), (1000, 1100), (2000, 2600), (37, 38), (63, 70))
LATER = (2100, 2200, 2599, 2065)
# Few heads to a KV head and many; not a multiple of 32.
SHAPES = [(9, 3, 64), (10, 2, 32), (4, 2, 24), (4, 4, 128)]


def attend(batch, features, positions, first, shared=0):
    """As many rows as `positions`, or one row of the queries from `first` up to the one in `positions`."""
    q, cache, places, _, _, table = batch
    rows = [slice(first, positions[0] + 1)] if first is not None else [slice(p, p + 1) for p in positions]
    starts = torch.tensor([0, *(row.stop - row.start for row in rows)]).cumsum(0).int()
    lengths = torch.tensor([row.stop for row in rows]).int()
    return native.attention(
        torch.cat([q[row] for row in rows]), cache, places.repeat(len(rows)), starts, lengths, table, features,
        shared=shared,
    )  # fmt: skip


@pytest.mark.parametrize("features", ["", "all"])
@pytest.mark.parametrize("window", [None, 100, 2500])
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), SHAPES)
def test_alone_in_chunks_and_after_shared_keys(heads, kv_heads, head_size, window, features):
    batch = paged_batch([(0, LENGTH)], 16, heads, kv_heads, head_size, torch.bfloat16)
    layer = make_features(features, heads, 0.3, window)
    whole = native.attention(*batch, layer)
    for position in ALONE:
        assert torch.equal(attend(batch, layer, [position], None)[0], whole[position]), position
    for first, end in CHUNKS:
        assert torch.equal(attend(batch, layer, [end - 1], first), whole[first:end]), (first, end)
    for shared in (16, 64, 80, 640, 1024, 1040, 2048, 2064) if window is None else ():
        assert torch.equal(attend(batch, layer, LATER, None, shared), whole[list(LATER)]), shared


@pytest.mark.parametrize(("outputs", "inputs"), [(100, 64), (37, 67)])
def test_products_of_a_row_among_any_number_of_rows(outputs, inputs):
    torch.manual_seed(0)
    packed = native.pack_linear(torch.randn(outputs, inputs).bfloat16())
    x, bias = torch.randn(30, inputs).bfloat16(), torch.randn(outputs).bfloat16()
    whole = native.linear(x, packed, outputs, bias)
    for rows in range(1, len(x)):
        assert torch.equal(native.linear(x[-rows:], packed, outputs, bias), whole[-rows:]), rows
