import torch

from quire.messages.kv_cache import FullAttentionSpec, KVCacheConfig, SlidingWindowSpec, make_groups
from quire.worker.memory import MARGIN, MAX_CODE, DeviceMemory, kv_cache_budget, state_memory
from quire.worker.rows import RowState, row_state_bytes

GIB = 1 << 30
FULL = FullAttentionSpec(16, 2, 64, "bfloat16")
WINDOW = SlidingWindowSpec(16, 2, 64, "bfloat16", sliding_window=128)


def test_the_kv_cache_gets_the_rest_of_the_utilization():
    before, now = DeviceMemory(80 * GIB, 2 * GIB), DeviceMemory(80 * GIB, 2 * GIB + GIB // 2)
    assert kv_cache_budget(before, now, 0.5, reserved=10 * GIB) == 40 * GIB - 2 * GIB - GIB // 2 - 10 * GIB - MARGIN


def test_other_processes_change_the_budget_by_a_bounded_amount():
    before = DeviceMemory(80 * GIB, 20 * GIB)
    alone = kv_cache_budget(before, before, 0.9, reserved=10 * GIB)
    one_went, one_came = DeviceMemory(80 * GIB, 5 * GIB), DeviceMemory(80 * GIB, 50 * GIB)
    assert kv_cache_budget(before, one_went, 0.9, reserved=10 * GIB) == alone
    assert kv_cache_budget(before, one_came, 0.9, reserved=10 * GIB) == alone - MAX_CODE


def test_row_state_bytes_equal_what_is_allocated():
    specs = dict.fromkeys(range(5), WINDOW) | {5: FULL}
    state = RowState(32, 1000, KVCacheConfig(1, make_groups(specs)), torch.device("cpu"))
    tensors = (state.token_ids, state.num_tokens, state.num_computed, state.token_limit, state._all_tables)
    assert row_state_bytes(32, 1000, state.block_sizes) == sum(tensor.nbytes for tensor in tensors)


def test_rows_longer_than_the_cache_are_not_budgeted():
    specs = dict.fromkeys(range(4), FULL)
    fits = 1 << 20
    budget = fits * 4 * FULL.page_bytes // FULL.block_size
    assert state_memory(specs, 64, 100 << 20, 1000, budget) == state_memory(specs, 64, fits, 1000, budget)
    assert state_memory(specs, 64, 1 << 17, 1000, budget) > 64 * 4 * (1 << 17)
