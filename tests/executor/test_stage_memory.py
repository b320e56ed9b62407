"""The KV cache over stages: the same blocks everywhere, as many as fit the memory of every stage."""

from quire.core.kv_layout import plan_kv_cache
from quire.executor.stages import memory_of_all, specs_of_all
from quire.messages.kv_cache import FullAttentionSpec, SlidingWindowSpec

FULL = FullAttentionSpec(16, 2, 32, "float32")
WINDOW = SlidingWindowSpec(16, 2, 32, "float32", sliding_window=64)
PAGE = FULL.page_bytes


def test_a_stage_with_half_of_the_layers_has_twice_the_blocks():
    stages = [{0: FULL, 1: FULL}, {2: FULL, 3: FULL}]
    memory = [20 * PAGE, 22 * PAGE]
    layout = plan_kv_cache(specs_of_all(stages), memory_of_all(memory, stages))
    assert layout.num_blocks + 1 == 10  # and the null block
    assert [layout.part_of(stage).num_tensors for stage in stages] == [2, 2]


def test_a_stage_without_layers_of_a_kind_keeps_its_group():
    stages = [{0: WINDOW, 1: WINDOW, 2: WINDOW}, {3: WINDOW, 4: FULL, 5: FULL}]
    layout = plan_kv_cache(specs_of_all(stages), memory_of_all([60 * PAGE, 60 * PAGE], stages))
    parts = [layout.part_of(stage) for stage in stages]
    assert [len(part.groups) for part in parts] == [len(layout.groups)] * 2
    assert sorted(layer for part in parts for group in part.groups for layer in group.layers) == list(range(6))
    for part in parts:
        assert (layout.num_blocks + 1) * part.num_tensors * part.page_bytes <= 60 * PAGE
        assert [group.spec for group in part.groups] == [group.spec for group in layout.groups]
