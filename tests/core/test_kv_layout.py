import pytest

from quire.core.kv_layout import blocks_of_one_request, bytes_per_block, longest_model_len, plan_kv_cache
from quire.messages.kv_cache import KVCacheSpec, make_groups


def kind(window=None, heads=2, block_size=16):
    return KVCacheSpec(block_size, heads, 64, 2, window)


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
    with pytest.raises(ValueError, match="must divide"):
        make_groups({0: kind(heads=2), 1: kind(heads=3)})


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
