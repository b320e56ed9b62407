import numpy as np
import pytest
import torch

from quire.messages.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from quire.messages.sampling_params import SamplingParams
from quire.worker import rows
from quire.worker.rows import RowState
from tests.sample.rows import new_row


def test_more_tokens_than_can_be_indexed_are_refused():
    cache = KVCacheConfig(1, (KVCacheGroup((0,), FullAttentionSpec(16, 1, 16, "bfloat16")),))
    with pytest.raises(
        ValueError, match=r"max_num_seqs 1024 x max_model_len 2097152 .*--max-num-seqs, --max-model-len"
    ):
        RowState(1024, 1 << 21, cache, torch.device("meta"))
    assert RowState(1024, (1 << 21) - 1, cache, torch.device("meta")).token_ids.shape == (1024, (1 << 21) - 1)


@pytest.mark.parametrize("clears_tables", [False, True])
def test_rows_that_are_long_or_alone_are_as_others(monkeypatch, clears_tables):
    config = KVCacheConfig(99, tuple(KVCacheGroup((i,), FullAttentionSpec(8, 1, 4, "float32")) for i in range(2)))
    options = {"pages_per_block": [1, 4], "clears_tables": clears_tables}

    def filled(long_prompt, groups):
        monkeypatch.setattr(rows, "LONG_PROMPT", long_prompt)
        state = RowState(4, 40, config, torch.device("cpu"), **options)
        for given in groups:
            state.add([made[i] for i in given])
        return [state._counts, state.token_ids, *state.block_tables]

    made = []
    for row, count in ((2, 9), (0, 33), (3, 1), (2, 17)):
        new = new_row(row, SamplingParams(), np.arange(100 * row, 100 * row + count, dtype=np.int32))
        blocks = -(-count // 8)
        new.block_ids = [list(range(10 * row + 1, 10 * row + 1 + blocks)), list(range(50, 50 + blocks))]
        new.num_computed, new.token_limit = count - 1, count + 5
        made.append(new)
    at_once = filled(1000, [[0, 1, 2], [3]])
    for one, other in zip(at_once, filled(0, [[0, 1, 2], [3]]), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(at_once, filled(1000, [[0], [1], [2], [3]]), strict=True):
        assert torch.equal(one, other)
