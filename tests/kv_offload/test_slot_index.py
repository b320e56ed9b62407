"""The index of host slots, and what it gives up."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.distributed.kv_offload.eviction import ARC, LRU, POLICIES
from quire.distributed.kv_offload.slot_index import SlotIndex
from tests.properties import examples


def key(number):
    return bytes([number]), 0


def save(index, *numbers):
    keys = [key(number) for number in numbers]
    slots = index.write(keys)
    index.written(keys[: len(slots)], slots)


def index_of(policy, num_slots):
    index = SlotIndex(policy)
    index.grow(num_slots)
    return index


def held(index, count=20):
    return [number for number in range(count) if index.holds(key(number))]


def test_slots_are_neighbours():
    index = index_of(LRU(), 8)
    assert index.write([key(0), key(1), key(2)]) == [0, 1, 2]
    index.grow(10)
    assert index.write([key(3)]) == [3]


def test_the_least_recently_used_goes_first():
    index = index_of(LRU(), 3)
    save(index, 0, 1, 2)
    index.use([key(0)])
    index.renew([key(1)])
    save(index, 3)
    assert held(index) == [0, 1, 3] and index.num_evicted == 1
    save(index, 4)
    assert held(index) == [1, 3, 4]


def test_arc_keeps_what_was_hit_from_what_is_only_passing():
    for policy, kept in ((ARC(), [0, 1]), (LRU(), [])):
        index = index_of(policy, 4)
        save(index, 0, 1)
        index.use([key(0)])
        index.use([key(1)])
        for number in range(2, 15):
            save(index, number)
        assert [number for number in held(index) if number < 2] == kept


def test_arc_learns_from_what_comes_back():
    index = index_of(ARC(), 4)
    save(index, 0, 1, 2, 3)
    index.use([key(0)])
    save(index, 4)  # in place of 1, which is remembered
    assert held(index) == [0, 2, 3, 4]
    save(index, 1)
    index.use([key(2)])
    for number in range(5, 12):
        save(index, number)
    assert {1, 2} & set(held(index)), "seen again, so not passing"


def test_what_is_read_or_written_is_not_given_up():
    index = index_of(LRU(), 2)
    save(index, 0)
    (slot,) = index.read([key(0)])
    index.write([key(1)])
    assert index.write([key(2)]) == [], "all slots are busy"
    index.done_reading([key(0)], [slot])
    assert index.write([key(2)]) == [slot]
    assert not index.holds(key(2)) and key(2) in index


def test_dropped_content_keeps_its_slot_until_it_is_no_longer_read():
    index = index_of(LRU(), 1)
    save(index, 0)
    (slot,) = index.read([key(0)])
    index.clear()
    assert index.write([key(1)]) == [] and index.num_busy == 1
    index.done_reading([key(0)], [slot])
    assert index.write([key(1)]) == [slot]
    index.clear()
    index.written([key(1)], [slot])
    assert not index.holds(key(1)) and index.write([key(2)]) == [slot]


@settings(max_examples=examples(300))
@given(st.sampled_from(sorted(POLICIES)), st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=60))
@pytest.mark.filterwarnings("ignore")
def test_no_slot_is_lost_or_given_twice(policy, actions):
    index = index_of(POLICIES[policy](), 4)
    reading, writing = [], []
    for action, number in actions:
        one = key(number)
        if action == 0 and one not in index:
            writing += [([one], [slot]) for slot in index.write([one])]
        elif action == 1 and writing:
            index.written(*writing.pop(number % len(writing)))
        elif action == 2 and index.holds(one):
            reading.append(([one], index.read([one])))
        elif action == 3 and reading:
            index.done_reading(*reading.pop(number % len(reading)))
        elif action == 4:
            index.use([one])
        elif action == 5:
            index.renew([one])
        elif action == 6 and number == 9:
            index.clear()
        slots = [*index._held.values(), *index._writing.values(), *index._free, *index._abandoned]
        assert sorted(slots) == list(range(4))
        assert set(index._readers) <= set(index._held)
        in_use = {slot for _, (slot,) in (*reading, *writing)}
        assert not in_use & set(index._free)
    for one, slot in reading:
        index.done_reading(one, slot)
    for one, slot in writing:
        index.written(one, slot)
    assert index.num_busy == 0
