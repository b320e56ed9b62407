"""Measures the machine: read bandwidth and bf16 GEMM rates. Run as a subprocess by `machine.py`.

Prints one JSON object per line as it measures. Some virtual machines advertise AMX without its tiles, which kills a
process at its first bf16 matmul; the lines printed before that remain, and the benchmark continues.
"""

import json
import time
from collections.abc import Callable

import torch

READ_MIB = (64, 512)  # one size that large caches hold, one that comes from memory
# (rows, K, N): one decode step, a small batch, and two prefill chunks.
GEMMS = ((1, 1024, 3072), (64, 576, 1536), (512, 1024, 3072), (1024, 1024, 3072))


def best_seconds(work: Callable[[], object], budget: float = 0.2) -> float:
    """The fastest of the runs that fit in `budget` seconds, after one to warm up."""
    work()
    best, end = float("inf"), time.perf_counter() + budget
    while time.perf_counter() < end:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def read_gb_per_s(mib: int) -> float:
    data = torch.ones(mib << 18, dtype=torch.float32)
    return data.nbytes / best_seconds(data.sum) / 1e9


def gemm_gflop_per_s(rows: int, k: int, n: int) -> float:
    x, weight = torch.randn(rows, k).bfloat16(), torch.randn(n, k).bfloat16()
    return 2 * rows * k * n / best_seconds(lambda: torch.nn.functional.linear(x, weight)) / 1e9


def emit(name: str, value: float) -> None:
    print(json.dumps({name: round(value, 1)}), flush=True)


if __name__ == "__main__":
    emit("threads", torch.get_num_threads())
    for mib in READ_MIB:
        emit(f"read_gb_per_s_{mib}_mib", read_gb_per_s(mib))
    for rows, k, n in GEMMS:
        emit(f"bf16_gflop_per_s_{rows}x{k}x{n}", gemm_gflop_per_s(rows, k, n))
