import pytest

from quire.core.kv_layout import blocks_of_one_request, bytes_per_block, longest_model_len, plan_kv_cache
from quire.messages.kv_cache import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    LatentSpec,
    PagePart,
    SlidingWindowSpec,
    StateSpec,
    make_groups,
)


def kind(window=None, heads=2, block_size=16):
    if window is None:
        return FullAttentionSpec(block_size, heads, 64, "bfloat16")
    return SlidingWindowSpec(block_size, heads, 64, "bfloat16", sliding_window=window)


def test_layers_of_one_kind_are_one_group():
    groups = make_groups({i: kind() for i in range(30)})
    assert len(groups) == 1 and len(groups[0].layers) == 30
    assert bytes_per_block(groups) == 30 * 2 * 16 * 2 * 64 * 2


def test_mixed_layers_share_pages_of_equal_bytes():
    # Five windowed layers to one full one: groups of the size of the smaller kind, the last padded.
    groups = make_groups({i: kind(None if i % 6 == 5 else 512) for i in range(26)})
    assert sorted(len(g.layers) for g in groups) == [2, 4, 4, 4, 4, 4, 4]
    assert sorted(layer for g in groups for layer in g.layers) == list(range(26))
    assert len({g.spec.page_bytes for g in groups}) == 1


def test_smaller_tokens_get_larger_blocks():
    groups = make_groups({0: kind(heads=2), 1: kind(heads=1)})
    assert [g.spec.block_size for g in groups] == [16, 32]
    # Neither divides the other: both fill a page that is a multiple of both.
    groups = make_groups({0: kind(heads=2), 1: kind(heads=3)})
    assert [g.spec.block_size for g in groups] == [48, 32]
    assert len({g.spec.page_bytes for g in groups}) == 1


def test_sizes_that_share_no_reasonable_multiple_are_padded():
    odd, full = LatentSpec(16, 37, 8, "bfloat16"), kind(heads=3)
    config = KVCacheConfig(1, make_groups({0: full, 1: odd}))
    assert config.page_bytes == full.page_bytes
    assert [g.spec.block_size for g in config.groups] == [16, 128]
    assert config.page_bytes > config.groups[1].spec.page_bytes
    assert bytes_per_block(config.groups) == config.page_bytes


def test_a_state_is_one_page_whatever_its_tokens():
    state = StateSpec(64, (PagePart((3, 5), "float32"), PagePart((7,), "bfloat16")))
    large = StateSpec(64, (PagePart((100, 100), "float32"),))
    assert state.page_bytes == 74
    small_page, large_page = (KVCacheConfig(1, make_groups({0: kind(), 1: spec})) for spec in (state, large))
    assert small_page.page_bytes == kind().page_bytes
    # Keys and values fill the page that the large state needs.
    page = large_page.page_bytes
    assert page == large_page.groups[0].spec.page_bytes >= 40_000 and page % kind().page_bytes == 0
    assert [g.spec.block_size for g in small_page.groups] == [16, 64]
    # However long the request: the live page, and the checkpoints that a step crosses.
    assert blocks_of_one_request(small_page.groups[1:], 10_000, 128) == 4


def test_scales_lie_inside_the_page():
    spec = FullAttentionSpec(3, 1, 5, "int8", scale_dtype="float32")
    assert [part.shape for part in spec.parts()] == [(2, 1, 3, 5), (2, 1, 3)]
    assert spec.offsets() == (0, 32, 56)  # the scales begin at a multiple of four
    assert spec.parts(1)[1].shape == (2, 1, 1)


def test_a_kind_of_few_layers_does_not_set_the_length_of_groups():
    draft = make_groups({i: kind(512 if i == 32 else None) for i in range(33)})
    assert len(draft) == 9 and max(len(g.layers) for g in draft) == 4
    # 52 windowed and 10 full layers: ten to a group would pad eight layers, thirteen pad three.
    groups = make_groups({i: kind(None if i % 6 == 5 else 512) for i in range(62)})
    assert sorted(len(g.layers) for g in groups) == [10, 13, 13, 13, 13]


def test_a_kind_that_no_group_allocates():
    cross = CrossAttentionSpec(16, 2, 64, "bfloat16")
    assert cross.page_bytes == kind().page_bytes
    with pytest.raises(ValueError, match="CrossAttentionSpec are not served yet"):
        blocks_of_one_request(make_groups({0: cross}), 100, 64)


def test_cache_size_from_a_budget():
    config = plan_kv_cache({0: kind()}, memory=10 * kind().page_bytes)
    assert config.num_blocks == 9  # one is the null block
    with pytest.raises(ValueError, match="kv-cache-memory-bytes"):
        plan_kv_cache({0: kind()}, memory=kind().page_bytes)


def test_the_longest_request_that_fits():
    full = make_groups({0: kind()})
    assert longest_model_len(full, 10, 10_000, 64) == 160
    windowed = make_groups({0: kind(window=32)})
    assert longest_model_len(windowed, 10, 10_000, 64) == 10_000  # a window never holds more than window and step
    assert blocks_of_one_request(windowed, 10_000, 64) == 7
