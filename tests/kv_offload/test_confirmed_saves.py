"""Blocks are saved once the plans that computed them have succeeded, and never after one has failed."""

from quire.distributed.kv_offload.confirmed_saves import ConfirmedSaves

A, B, C = ((bytes([i]) * 32, 0) for i in range(3))


def test_blocks_wait_for_the_results_of_their_plan():
    saves = ConfirmedSaves()
    saves.add(1, A)
    assert saves and saves.take(step=1) == {}
    saves.add(2, B)
    assert saves.take(step=2) == {} and not saves
    saves.confirm(1)
    assert saves and saves.take(step=3) == {A: 1}
    saves.confirm(2)
    assert saves.take(step=5) == {B: 2} and not saves


def test_a_block_that_is_overwritten_is_saved_at_the_last_moment_or_dropped():
    saves = ConfirmedSaves()
    saves.add(1, A)
    saves.add(2, B)
    saves.take(step=1)
    assert not saves.evict(2, B) and saves.num_dropped == 1
    saves.confirm(1)
    assert saves.evict(1, A) and saves.take(step=2) == {A: 1}
    saves.add(3, C)
    assert not saves.evict(4, C) and saves.num_dropped == 1, "another block had the same content"


def test_nothing_survives_a_failed_plan():
    saves = ConfirmedSaves()
    saves.add(1, A)
    saves.take(step=1)
    saves.add(2, B)
    saves.take(step=2)
    saves.clear()
    saves.confirm(2)
    assert not saves and saves.take(step=3) == {}
