import pytest
import torch

from quire.messages.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from quire.worker.rows import RowState


def test_more_tokens_than_can_be_indexed_are_refused():
    cache = KVCacheConfig(1, (KVCacheGroup((0,), FullAttentionSpec(16, 1, 16, "bfloat16")),))
    with pytest.raises(
        ValueError, match=r"max_num_seqs 1024 x max_model_len 2097152 .*--max-num-seqs, --max-model-len"
    ):
        RowState(1024, 1 << 21, cache, torch.device("meta"))
    assert RowState(1024, (1 << 21) - 1, cache, torch.device("meta")).token_ids.shape == (1024, (1 << 21) - 1)
