"""Prefix hits with full and sliding-window groups, and blocks of different sizes."""

import numpy as np

from quire.core.kv_cache_manager import KVCacheManager
from quire.messages.kv_cache import KVCacheConfig, KVCacheGroup
from tests.core import fake_engine
from tests.core.fake_engine import spec, state_spec


def manager(*specs, num_blocks=64):
    return KVCacheManager(KVCacheConfig(num_blocks, tuple(KVCacheGroup((i,), s) for i, s in enumerate(specs))))


def request(name, num_tokens, groups, start=0):
    return fake_engine.request(name, prompt=range(start, start + num_tokens), num_groups=groups)


def computed(kv, name, num_tokens):
    """A request that has computed and registered all its tokens."""
    r = request(name, num_tokens, len(kv.groups))
    assert kv.allocate(r, num_tokens)
    kv.register(r, r.token_ids, 0, num_tokens)
    return r


def test_a_hit_leaves_at_least_one_token_to_compute():
    kv = manager(spec(4))
    computed(kv, "a", 16)
    assert kv.find_hit(request("b", 16, 1)).num_tokens == 12
    assert kv.find_hit(request("c", 17, 1)).num_tokens == 16


def test_a_window_hits_its_last_blocks_and_the_rest_is_null():
    kv = manager(spec(4), spec(4, window=6))
    a = computed(kv, "a", 32)
    kv.free_out_of_window(a, 32)  # the window keeps blocks 6 and 7 (positions 27 and later)
    assert [block.id > 0 for block in a.blocks[1]] == [False] * 6 + [True] * 2
    hit = kv.find_hit(request("b", 40, 2))
    assert hit.num_tokens == 32
    assert [block.id > 0 for block in hit.blocks[1]] == [False] * 6 + [True] * 2
    assert all(block.id for block in hit.blocks[0])


def forget(pool, block):
    """As if another request had been given the block meanwhile."""
    del pool._cached[block.key]
    block.key = None


def test_a_missing_window_block_shortens_the_hit_for_all_groups():
    kv = manager(spec(4), spec(4, window=6))
    a = computed(kv, "a", 32)
    forget(kv.pool, a.blocks[1][6])
    # Ending at 32 needs window blocks 6 and 7, at 28 blocks 5 and 6: the longest prefix without block 6 ends at 24.
    assert kv.find_hit(request("b", 40, 2)).num_tokens == 24
    forget(kv.pool, a.blocks[0][2])
    assert kv.find_hit(request("c", 40, 2)).num_tokens == 8


def test_groups_with_different_block_sizes_hit_at_common_multiples():
    kv = manager(spec(4), spec(6))
    computed(kv, "a", 40)
    assert kv.alignment == 12 and kv.hasher is not None and kv.hasher.block_size == 2
    hit = kv.find_hit(request("b", 64, 2))
    assert hit.num_tokens == 36
    assert [len(blocks) for blocks in hit.blocks] == [9, 6]


def test_sliding_windows_free_the_blocks_outside():
    kv = manager(spec(16), spec(16, window=32), num_blocks=200)
    r = request("a", 1000, 2)
    for done in range(0, 1000, 100):
        kv.free_out_of_window(r, done)
        assert kv.allocate(r, done + 100)
    kv.free_out_of_window(r, 999)
    held = [sum(block.id > 0 for block in blocks) for blocks in r.blocks]
    assert held == [63, 3]  # positions 968..999 lie in blocks 60, 61 and 62
    assert kv.pool.num_free == 200 - 66


def test_allocation_is_all_or_nothing_over_groups():
    kv = manager(spec(4), spec(4), num_blocks=7)
    r = request("a", 16, 2)
    assert not kv.allocate(r, 16)
    assert kv.pool.num_free == 7 and not r.has_blocks
    assert kv.allocate(r, 12)


def test_common_prefix_counts_shared_leading_blocks():
    kv = manager(spec(4))
    a = computed(kv, "a", 16)
    b = request("b", 20, 1)
    assert kv.allocate(b, 20, kv.find_hit(b))
    assert kv.common_prefix_blocks([a, b]) == (4,)
    c = request("c", 8, 1, start=50)
    assert kv.allocate(c, 8, kv.find_hit(c))
    assert kv.common_prefix_blocks([a, b, c]) == (0,)


def test_a_common_prefix_may_be_of_different_blocks_with_the_same_content():
    """One computes a prefix again while the middle of it is gone from the cache: its copy of the middle is found with
    the old blocks around it."""
    kv = manager(spec(4))
    old = computed(kv, "old", 12)
    forget(kv.pool, old.blocks[0][1])
    again = computed(kv, "again", 12)  # without looking for a hit, as for prompt logprobs
    assert again.blocks[0][0].key is None and again.blocks[0][1].key is not None
    mixed = request("mixed", 13, 1)
    assert kv.allocate(mixed, 13, kv.find_hit(mixed))
    assert mixed.blocks[0][:3] == [old.blocks[0][0], again.blocks[0][1], old.blocks[0][2]]
    (count,) = kv.common_prefix_blocks([again, mixed])
    assert count == 2 and np.array_equal(again.token_ids[: count * 4], mixed.token_ids[: count * 4])


def test_the_tail_of_a_request_is_evicted_before_what_others_may_share():
    kv = manager(spec(4), num_blocks=4)
    a = computed(kv, "a", 16)
    ids = [block.id for block in a.blocks[0]]
    kv.free(a)
    assert kv.find_hit(request("b", 17, 1)).num_tokens == 16
    assert [block.id for block in kv.pool.allocate(2)] == ids[:1:-1]
    assert kv.find_hit(request("c", 17, 1)).num_tokens == 8


def test_a_window_has_no_common_prefix():
    kv = manager(spec(4), spec(4, window=100))
    computed(kv, "a", 16)
    b, c = (request(name, 17, 2) for name in "bc")
    for one in (b, c):
        assert kv.allocate(one, 17, kv.find_hit(one))
    assert kv.common_prefix_blocks([b, c]) == (4, 0)


def test_blocks_that_are_in_use_cost_nothing_to_share():
    kv = manager(spec(4), num_blocks=5)
    computed(kv, "a", 16)
    b = request("b", 17, 1)
    assert kv.pool.num_free == 1 and kv.allocate(b, 17, kv.find_hit(b))


def test_a_state_hits_at_its_checkpoints():
    kv = manager(spec(4), state_spec(8))
    a = computed(kv, "a", 30)
    assert [block.id > 0 for block in a.blocks[1]] == [True] * 4  # three checkpoints and the live page
    kv.free_out_of_window(a, 30)
    assert [block.id > 0 for block in a.blocks[1]] == [False] * 3 + [True]
    hit = kv.find_hit(request("b", 29, 2))
    assert hit.num_tokens == 24 and [block.id > 0 for block in hit.blocks[1]] == [False] * 2 + [True]
    b = request("b", 29, 2)
    assert kv.allocate(b, 29, hit, hit.num_tokens)
    assert b.blocks[1][2] is hit.blocks[1][2] and b.blocks[1][3].ref == 1  # it goes on in a page of its own
    assert not kv.can_fork(a, request("c", 30, 2))


def test_a_state_is_found_by_plans_after_the_one_that_writes_it():
    kv = manager(state_spec(4))
    a = request("a", 9, 1)
    assert kv.allocate(a, 9)
    kv.register(a, a.token_ids, 0, 9, admitting=True)
    assert kv.find_hit(request("b", 9, 1)).num_tokens == 0
    kv.register_deferred()
    assert kv.find_hit(request("b", 9, 1)).num_tokens == 8
