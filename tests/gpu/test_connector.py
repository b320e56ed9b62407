"""KV connectors on a GPU: a host tier that works on whole steps, with graphs on."""

import pytest
import torch

import tests.engine.host_tier  # noqa: F401 - registers "host"
from tests.gpu.test_engine import engine, greedy, prompts, tokens
from tests.tiny_models import save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_host_tier_returns_what_the_cache_evicted(tmp_path):
    save_tiny("qwen3", tmp_path, max_position_embeddings=2048)
    asked = prompts(8, 100, 300)
    with engine(str(tmp_path)) as llm:
        expected = tokens(llm.generate(asked, greedy(), use_tqdm=False))
    small = {"num_gpu_blocks_override": 64, "kv_cache_memory_bytes": None}
    with engine(str(tmp_path), kv_connector="host", **small) as llm:
        for _ in range(2):
            outputs = llm.generate(asked, greedy(), use_tqdm=False)
            assert tokens(outputs) == expected
        assert all(o.num_cached_tokens >= len(o.prompt_token_ids) // 16 * 16 - 16 for o in outputs)
        assert llm.llm_engine.client.core.executor.worker.runner.graphs is not None
