"""Which blocks of a prefix a tier must have, in every group."""

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.kv_cache_manager import KVCacheManager
from quire.distributed.kv_offload.block_keys import BlockKeys
from quire.messages.kv_cache import KVCacheConfig, KVCacheGroup
from tests.core.fake_engine import spec, state_spec
from tests.core.test_properties import LAYOUTS
from tests.properties import examples


def layout_of(specs):
    return KVCacheConfig(200, tuple(KVCacheGroup((i,), s) for i, s in enumerate(specs)))


def hashes_of(count):
    return [bytes([i]) for i in range(count)]


def positions(keys, start, stop):
    return [(group, position) for group, position, _ in keys.needed(hashes_of(40), start, stop)]


def test_full_attention_needs_all_a_window_the_last_and_a_state_one():
    keys = BlockKeys(layout_of([spec(4), spec(4, 6), state_spec(4)]))
    assert positions(keys, 8, 20) == [(0, 2), (0, 3), (0, 4), (1, 3), (1, 4), (2, 4)]
    assert positions(keys, 16, 20) == [(0, 4), (1, 4), (2, 4)], "what is before 16 is on the device"


def test_blocks_of_several_sizes_share_hashes():
    keys = BlockKeys(layout_of([spec(2), spec(4)]))
    assert keys.alignment == 4 and keys.hash_size == 2
    found = keys.needed(hashes_of(4), 0, 8)
    assert [key for _, _, key in found] == [(b"\0", 0), (b"\1", 0), (b"\2", 0), (b"\3", 0), (b"\1", 1), (b"\3", 1)]


def test_what_is_missing_in_one_group_ends_the_prefix_for_all():
    keys = BlockKeys(layout_of([spec(4), spec(4, 6)]))
    hashes = hashes_of(8)
    assert keys.longest(hashes, 0, 31, lambda key: True) == 28
    assert keys.longest(hashes, 0, 32, lambda key: key != (hashes[5], 0)) == 20
    assert keys.longest(hashes, 0, 32, lambda key: key != (hashes[5], 1)) == 32, "the window has moved on"
    assert keys.longest(hashes, 0, 28, lambda key: key != (hashes[6], 1)) == 24
    assert keys.longest(hashes, 8, 32, lambda key: key[0] in hashes[2:4]) == 16
    assert keys.longest(hashes, 8, 32, lambda key: False) == 8
    assert keys.longest(hashes, 6, 32, lambda key: True) == 6, "in the middle of a block"


@settings(max_examples=examples(200))
@given(st.sampled_from(LAYOUTS), st.integers(0, 48), st.data())
def test_it_agrees_with_how_the_cache_hits(specs, limit, data):
    layout = layout_of(specs)
    kv, keys = KVCacheManager(layout), BlockKeys(layout)
    hashes = hashes_of(48 // keys.hash_size)
    present = set(data.draw(st.lists(st.sampled_from([key for _, _, key in everything(layout, keys, hashes)]))))
    missing = data.draw(st.booleans())
    held = [key for _, _, key in everything(layout, keys, hashes) if (key in present) != missing]
    for key in held:
        kv.pool.register(kv.pool.allocate(1)[0], key)
    assert keys.longest(hashes, 0, limit, set(held).__contains__) == kv._longest_hit(hashes, limit)


def everything(layout, keys, hashes):
    full = [KVCacheGroup(group.layers, spec(group.spec.block_size)) for group in layout.groups]
    return BlockKeys(KVCacheConfig(200, tuple(full))).needed(hashes, 0, 48 // keys.alignment * keys.alignment)
