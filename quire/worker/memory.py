"""The KV cache's memory budget: what is left on the device beside everything else that this process will use."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.messages.kv_cache import KVCacheConfig, KVCacheSpec, make_groups
from quire.sample.penalties import penalty_table_bytes
from quire.worker.model_runner import ModelRunner
from quire.worker.rows import row_state_bytes

MARGIN = 256 << 20  # libraries load code and allocate workspaces after the first step, too
MAX_CODE = 1 << 30  # attributed to this process: more was allocated by another one meanwhile
SAMPLING_COPIES = 2  # of the logits in float32: one to process, one for logprobs


@dataclass(frozen=True)
class DeviceMemory:
    total: int
    outside: int  # used, but not by torch: this process's context and code, and other processes

    @classmethod
    def measure(cls, device: torch.device) -> "DeviceMemory":
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, total - free - torch.cuda.memory_reserved(device))


def kv_cache_budget(before: DeviceMemory, now: DeviceMemory, utilization: float, reserved: int) -> int:
    """Bytes. `before`: when the worker started. `reserved`: torch's peak for everything but the KV cache.

    What other processes allocate or free between `before` and `now` must not count, and cannot be distinguished from
    code that was loaded; so that part is bounded.
    """
    code = min(max(now.outside - before.outside, 0), MAX_CODE)
    return int(before.total * utilization) - before.outside - code - reserved - MARGIN


def measure_steps(
    runner: ModelRunner, specs: dict[int, KVCacheSpec], max_rows: int, max_tokens: int
) -> tuple[int, DeviceMemory]:
    """Peak bytes that torch reserves for weights and steps, and the memory outside of torch once all graphs are
    captured.

    The largest step is run with padding over a cache of one block, with the buffers of sampling; then, as graphs have
    memory of their own, the largest graphs are captured. Both are discarded, the compiled kernels stay."""
    device = runner.device
    runner.initialize(KVCacheConfig(1, make_groups(specs)), max_rows, 1)
    runner.compile_kernels(max_tokens)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    logits = runner.run_padding(max_tokens, adapters=runner.lora is not None)
    copies = [torch.empty(logits.shape, dtype=torch.float32, device=device) for _ in range(SAMPLING_COPIES)]
    del copies, logits
    if runner.proposer is not None:
        with torch.inference_mode():
            runner.proposer.run_padding(max_tokens)
    torch.cuda.synchronize(device)
    eager = DeviceMemory.measure(device)
    runner.capture_graphs(max_tokens, largest_only=True)
    torch.cuda.synchronize(device)
    reserved, captured = torch.cuda.max_memory_reserved(device), DeviceMemory.measure(device)
    graphs = runner.graphs.max_growth if runner.graphs is not None else 0.0
    by_driver = int(max(0, captured.outside - eager.outside) * graphs)
    runner.graphs = None
    if runner.proposer is not None:
        runner.proposer.capture_graphs(())  # drops those it has
    torch.cuda.empty_cache()
    return reserved, DeviceMemory(eager.total, eager.outside + by_driver)


def state_memory(
    specs: dict[int, KVCacheSpec],
    max_rows: int,
    max_model_len: int,
    vocab: int,
    budget: int,
    pages_per_block: Sequence[int] | None = None,
) -> int:
    """Bytes of row state, and of penalty tables if every row uses penalties. A row is at most as long as a KV cache of
    `budget` bytes allows. `pages_per_block` as for RowState."""
    per_token = sum(spec.page_bytes // spec.block_size for spec in specs.values() if spec.grows)
    length = min(max_model_len, max(0, budget) // per_token) if per_token else max_model_len
    groups = make_groups(specs)
    pages = pages_per_block or [1] * len(groups)
    sizes = [group.spec.block_size // count for group, count in zip(groups, pages, strict=True)]
    rows = row_state_bytes(max_rows, length, sizes)
    return rows + penalty_table_bytes(max_rows, vocab)


def free_unused() -> None:
    """Give back what nothing refers to any more; a worker's parts refer to each other."""
    gc.collect()
    torch.cuda.empty_cache()
