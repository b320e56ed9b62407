"""How much device memory a step needs beside weights and KV cache."""

import torch

from quire.messages.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheSpec
from quire.worker.model_runner import ModelRunner

MARGIN = 256 << 20  # libraries load code and take workspaces later than a first step


def step_memory(
    runner: ModelRunner, specs: dict[int, KVCacheSpec], max_rows: int, max_tokens: int, dtype: torch.dtype
) -> int:
    """Bytes, measured: the largest step of padding is run over a cache of one block, and then, as graphs keep their
    memory apart from it, the largest graphs are captured. Both are thrown away, the compiled kernels stay."""
    device = runner.device
    group = KVCacheGroup(tuple(specs), next(iter(specs.values())))
    runner.initialize(KVCacheConfig(1, (group,)), max_rows, 1, dtype)
    runner.compile_kernels(max_tokens)
    torch.cuda.empty_cache()
    torch.cuda.synchronize(device)
    free_before, _ = torch.cuda.mem_get_info(device)
    runner.run_padding(max_tokens)
    torch.cuda.synchronize(device)
    eager = free_before - torch.cuda.mem_get_info(device)[0]  # still held by the allocator
    runner.capture_graphs(max_tokens, largest_only=True)
    torch.cuda.synchronize(device)
    total = free_before - torch.cuda.mem_get_info(device)[0]
    runner.graphs = None
    torch.cuda.empty_cache()
    return max(total, eager) + MARGIN
