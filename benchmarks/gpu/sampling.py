"""Microseconds of one draw on a GPU, replayed in a graph: python benchmarks/gpu/sampling.py"""

import argparse

import torch

from quire.kernels.sample_tokens import Draw, DrawParameters, sample_and_append
from quire.worker.rows import RowState

BATCHES = (1, 16, 64, 256)
REPEATS = 200


def parameters(rows: int, draw: Draw, top_k: int, top_p: float) -> DrawParameters:
    warped = draw >= Draw.WARPED
    return DrawParameters(
        seeds=torch.arange(rows, device="cuda"),
        temperature=torch.full((rows,), 0.8, device="cuda"),
        log_min_p=torch.full((rows,), -torch.inf, device="cuda"),
        top_p=torch.full((rows,), top_p if warped else 1.0, device="cuda"),
        top_k=torch.full((rows,), top_k if warped else 0, dtype=torch.int32, device="cuda"),
        greedy=torch.full((rows,), int(draw == Draw.GREEDY), dtype=torch.int32, device="cuda"),
    )


def measure(logits: torch.Tensor, draw: Draw, top_k: int, top_p: float) -> float:
    n = len(logits)
    state = RowState.__new__(RowState)  # the three tensors that a draw uses, without a KV cache
    state.token_ids = torch.zeros(n, 64, dtype=torch.int32, device="cuda")
    state.num_tokens = torch.zeros(n, dtype=torch.int64, device="cuda")
    state.num_computed = torch.full((n,), -1, dtype=torch.int64, device="cuda")  # never equal: nothing is appended
    rows = torch.arange(n, dtype=torch.int32, device="cuda")
    out = torch.empty(n, dtype=torch.int32, device="cuda")
    by_row = parameters(n, draw, top_k, top_p)
    sample_and_append(logits, rows, state, by_row, draw, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample_and_append(logits, rows, state, by_row, draw, out)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(10):
        graph.replay()
    start.record()
    for _ in range(REPEATS):
        graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1000 / REPEATS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--spread", type=float, default=3.0, help="standard deviation of the logits")
    arguments = parser.parse_args()
    kinds = [
        ("greedy", Draw.GREEDY, 0, 1.0),
        ("random", Draw.RANDOM, 0, 1.0),
        ("top-k 50", Draw.WARPED, 50, 1.0),
        ("top-k 20, top-p 0.95", Draw.WARPED, 20, 0.95),
        ("top-p 0.9", Draw.WARPED, 0, 0.9),
    ]
    print(f"vocab {arguments.vocab}, bfloat16; microseconds for a batch of")
    print(f"{'':24}" + "".join(f"{n:>10}" for n in BATCHES))
    for name, draw, top_k, top_p in kinds:
        times = []
        for n in BATCHES:
            logits = (torch.randn(n, arguments.vocab, device="cuda") * arguments.spread).bfloat16()
            times.append(measure(logits, draw, top_k, top_p))
        print(f"{name:24}" + "".join(f"{time:10.1f}" for time in times))


if __name__ == "__main__":
    main()
