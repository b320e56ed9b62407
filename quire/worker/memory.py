"""How much device memory the KV cache may take: what is left beside everything else that this process will use."""

from dataclasses import dataclass

import torch

from quire.messages.kv_cache import KVCacheConfig, KVCacheSpec, make_groups
from quire.sample.penalties import penalty_table_bytes
from quire.worker.model_runner import ModelRunner
from quire.worker.rows import row_state_bytes

MARGIN = 256 << 20  # libraries load code and take workspaces later than a first step
MOST_CODE = 1 << 30  # that is believed to be this process's: more has been taken by another meanwhile
SAMPLING_COPIES = 2  # of the logits, in float32: to edit, and to take logprobs of


@dataclass(frozen=True)
class DeviceMemory:
    total: int
    outside: int  # in use, but not torch's: this process's context and code, and what others have

    @classmethod
    def measure(cls, device: torch.device) -> "DeviceMemory":
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, total - free - torch.cuda.memory_reserved(device))


def kv_cache_budget(before: DeviceMemory, now: DeviceMemory, utilization: float, reserved: int) -> int:
    """Bytes. `before`: when the worker started. `reserved`: the most that torch takes for all but the KV cache.

    What others take or free between `before` and `now` must not count, and cannot be told from code that was loaded;
    so that part is bounded.
    """
    code = min(max(now.outside - before.outside, 0), MOST_CODE)
    return int(before.total * utilization) - before.outside - code - reserved - MARGIN


def measure_steps(
    runner: ModelRunner, specs: dict[int, KVCacheSpec], max_rows: int, max_tokens: int, dtype: torch.dtype
) -> tuple[int, DeviceMemory]:
    """The most bytes that torch takes for weights and steps, by the allocator's own count, and the memory outside of it
    once all graphs are there.

    The largest step of padding is run over a cache of one block, with what sampling takes, and then, as graphs keep
    their memory apart from it, the largest graphs are captured. Both are thrown away, the compiled kernels stay."""
    device = runner.device
    runner.initialize(KVCacheConfig(1, make_groups(specs)), max_rows, 1, dtype)
    runner.compile_kernels(max_tokens)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    logits = runner.run_padding(max_tokens)
    copies = [torch.empty(logits.shape, dtype=torch.float32, device=device) for _ in range(SAMPLING_COPIES)]
    del copies, logits
    torch.cuda.synchronize(device)
    eager = DeviceMemory.measure(device)
    runner.capture_graphs(max_tokens, largest_only=True)
    torch.cuda.synchronize(device)
    reserved, captured = torch.cuda.max_memory_reserved(device), DeviceMemory.measure(device)
    graphs = runner.graphs.growth if runner.graphs is not None else 0.0
    by_driver = int(max(0, captured.outside - eager.outside) * graphs)
    runner.graphs = None
    torch.cuda.empty_cache()
    return reserved, DeviceMemory(eager.total, eager.outside + by_driver)


def state_memory(specs: dict[int, KVCacheSpec], max_rows: int, max_model_len: int, vocab: int, budget: int) -> int:
    """Bytes of what rows keep beside their KV, if all ask for penalties. Rows are no longer than a KV cache of `budget`
    bytes lets one request be."""
    per_token = sum(spec.page_bytes // spec.block_size for spec in specs.values() if spec.sliding_window is None)
    length = min(max_model_len, max(0, budget) // per_token) if per_token else max_model_len
    rows = row_state_bytes(max_rows, length, [group.spec.block_size for group in make_groups(specs)])
    return rows + penalty_table_bytes(max_rows, vocab)
