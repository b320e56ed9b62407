import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.block_pool import BlockPool


def test_blocks_come_in_order_and_the_null_block_is_extra():
    pool = BlockPool(8)
    assert [b.id for b in pool.allocate(3)] == [1, 2, 3]
    assert pool.num_free == 5
    assert [b.id for b in pool.blocks] == [0, 1, 2, 3, 4] and pool.null_block.id == 0
    assert [b.id for b in pool.allocate(5)] == [4, 5, 6, 7, 8] and len(pool.blocks) == 9


def test_a_freed_block_can_be_found_until_it_is_allocated_again():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.register(block, (b"hash", 0))
    pool.free([block])
    assert pool.get((b"hash", 0)) is block
    pool.touch([block])
    assert block.ref == 1 and pool.num_free == 1
    pool.free([block])
    pool.allocate(2)
    assert pool.get((b"hash", 0)) is None


def test_blocks_without_content_are_reused_before_cached_ones_and_cached_ones_least_recent_first():
    pool = BlockPool(4)
    first, second, third, _ = blocks = pool.allocate(4)
    pool.register(first, (b"1", 0))
    pool.register(second, (b"2", 0))
    pool.free([second, first])
    pool.free([third])
    assert [b.id for b in pool.allocate(3)] == [third.id, second.id, first.id]
    assert blocks[3].ref == 1


def test_what_was_cached_is_taken_first_once_all_is_forgotten():
    pool = BlockPool(6)
    used = pool.allocate(3)
    for i, block in enumerate(used):
        pool.register(block, (bytes([i]), 0))
    held = used[1]
    pool.free([used[0], used[2]])
    pool.unregister_all()
    assert pool.num_cached == 0 and held.key is None
    assert {block.id for block in pool.allocate(2)} == {used[0].id, used[2].id}
    assert pool.num_free == 3


def test_equal_content_keeps_the_block_that_was_registered_first():
    pool = BlockPool(2)
    a, b = pool.allocate(2)
    pool.register(a, (b"same", 0))
    pool.register(b, (b"same", 0))
    assert pool.get((b"same", 0)) is a and b.key is None
    pool.register(b, (b"same", 1))  # another group is another cache
    assert pool.get((b"same", 1)) is b


def test_freeing_twice_is_caught():
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)


@given(
    st.lists(st.tuples(st.sampled_from(["allocate", "free", "touch", "register"]), st.integers(0, 30)), max_size=200)
)
def test_free_list_and_references_always_agree(operations):
    pool, held = BlockPool(8), []
    for kind, number in operations:
        if kind == "allocate" and pool.num_free >= number % 4:
            held += pool.allocate(number % 4)
        elif held and kind == "free":
            pool.free([held.pop(number % len(held))])
        elif held and kind == "touch":
            block = held[number % len(held)]
            pool.touch([block])
            held.append(block)
        elif held and kind == "register":
            pool.register(held[number % len(held)], (bytes([number]), 0))
        for block in pool.blocks[1:]:
            assert block.ref == held.count(block)
        not_made = 1 + pool.num_blocks - len(pool.blocks)
        assert pool.num_free == not_made + sum(block.ref == 0 for block in pool.blocks[1:])
        node, seen = pool._head.next, 0
        while node is not pool._tail:
            assert node.ref == 0
            node, seen = node.next, seen + 1
        assert not_made + seen == pool.num_free
