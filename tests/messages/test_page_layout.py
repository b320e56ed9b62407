"""Pages of one layout as those of another: split between ranks, joined, in blocks of another size."""

import numpy as np
import pytest

from quire.messages.kv_cache import FullAttentionSpec, LatentSpec, PagePart, SlidingWindowSpec, StateSpec

FULL = FullAttentionSpec(16, 4, 8, "bfloat16")
KINDS = {
    "full": FULL,
    "window": SlidingWindowSpec(16, 4, 8, "float32", sliding_window=40),
    "scales": FullAttentionSpec(16, 4, 8, "int8", scale_dtype="float32"),
    "latent": LatentSpec(16, 24, 8, "bfloat16"),
    "latent_scales": LatentSpec(16, 24, 8, "int8", scale_dtype="float32", index_size=4),
}


def pages_of(spec, count=6):
    return np.random.default_rng(0).integers(0, 256, (count, spec.page_bytes), np.uint8)


@pytest.mark.parametrize("spec", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_share_a_page_and_give_it_back(spec, ranks):
    pages = pages_of(spec)
    shares = spec.split(pages, ranks)
    assert [share.shape[1] for share in shares] == [spec.of_rank(ranks).page_bytes] * ranks
    assert np.array_equal(spec.join(shares), pages)


@pytest.mark.parametrize("spec", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("size", [8, 16, 32, 48, 96])
def test_blocks_of_another_size_and_back(spec, size):
    pages = pages_of(spec)
    other = spec.regroup(pages, size)
    assert len(other) == 96 // size
    back = type(spec)(**{**vars(spec), "block_size": size}).regroup(other, spec.block_size)
    assert np.array_equal(back, pages)


def test_a_rank_has_its_heads_and_a_block_its_tokens():
    keys = np.arange(2 * 4 * 16 * 8, dtype=np.uint16).reshape(2, 4, 16, 8)
    page = keys.view(np.uint8).reshape(1, -1)
    second = FULL.split(page, 2)[1].view(np.uint16).reshape(2, 2, 16, 8)
    assert np.array_equal(second, keys[:, 2:])
    shared = FULL.split(page, 8)
    assert np.array_equal(shared[2], shared[3]) and not np.array_equal(shared[1], shared[2])
    assert np.array_equal(shared[3].view(np.uint16).reshape(2, 16, 8), keys[:, 1])
    halves = FULL.regroup(page, 8).view(np.uint16).reshape(2, 2, 4, 8, 8)
    assert np.array_equal(halves[1], keys[:, :, 8:])


def test_what_cannot_be_converted_is_refused():
    with pytest.raises(ValueError, match="4 KV heads cannot be shared by 3 ranks"):
        FULL.split(pages_of(FULL), 3)
    with pytest.raises(ValueError, match="96 tokens do not fill blocks of 64"):
        FULL.regroup(pages_of(FULL), 64)
    state = StateSpec(16, (PagePart((4, 4), "float32"),))
    with pytest.raises(ValueError, match="cannot be split"):
        state.split(pages_of(state), 2)
    with pytest.raises(ValueError, match="no tokens"):
        state.regroup(pages_of(state), 8)
