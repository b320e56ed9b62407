"""Times every candidate kernel of a mixture of experts, and prints the lines of quire/kernels/moe_table.py.

    python -m benchmarks.gpu.moe [--json FILE] [--shape experts,chosen,hidden,intermediate] [--shared N] [--quick]

DeepSeek-V2-Lite is --shape 66,8,2048,1408 --shared 2, DeepSeek-V3 --shape 257,9,7168,2048 --shared 1 (in bfloat16).
`--quick` is the former with 64, 128 and 256 rows, in less than a minute.

Every figure is one layer's share (top-k, sort, products, sum; not the router's product) of a CUDA graph of layers. Each
of them has rows of its own, so that few rows find their experts in memory and not in the cache.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from quire.kernels.moe import ExpertWeights, fused_layer, moe_triton, prepare_moe
from quire.kernels.moe_routing import Routing
from quire.kernels.moe_table import (
    BUCKETS,
    FewConfig,
    GroupedConfig,
    MoeConfig,
    Shape,
    SlabConfig,
    TileConfig,
    choose,
    down_slabs,
    gate_up_slabs,
    tile_candidates,
    tile_heights,
)

QWEN3_30B, V2_LITE = (128, 8, 2048, 768), (66, 8, 2048, 1408)
QUICK_ROWS = (64, 128, 256)
MAX_FEW_ROWS = 32  # for which unsorted pairs are tried
FUSED_ROWS = (1, 2, 4, 8, 16)
PROFILED_ROWS = (1, 64, 256, 4096, 16384)
GRAPH_US = 4000  # of work in a graph
DEVICE = torch.device("cuda", 0)


def few_candidates(shape: Shape) -> list[FewConfig]:
    """Each kernel's candidates beside the likely one of the other: their times add up."""
    first, second = gate_up_slabs(shape[2]), down_slabs(shape[1], shape[3])
    return [FewConfig(slab, second[0]) for slab in first] + [FewConfig(first[0], slab) for slab in second[1:]]


def grouped_candidates(rows: int, shape: Shape) -> list[GroupedConfig]:
    """What is chosen now, and others."""
    found = []
    for m in tile_heights(rows, shape):
        first, second = tile_candidates(m, True), tile_candidates(m, False)
        found += [GroupedConfig(m, tile, second[0]) for tile in first]
        found += [GroupedConfig(m, first[0], tile) for tile in second[1:]]
    now = choose(rows, shape)
    return found if now in found or not isinstance(now, GroupedConfig) else [*found, now]


class Layer:
    def __init__(self, shape: Shape, shared: int = 0) -> None:
        num_experts, self.top_k, hidden, width = self.shape = shape
        self.routing, self.num_routed = Routing(self.top_k - shared, shared=shared), num_experts - shared
        torch.manual_seed(0)
        gate_up = torch.empty(num_experts, 2 * width, hidden, device=DEVICE, dtype=torch.bfloat16)
        down = torch.empty(num_experts, hidden, width, device=DEVICE, dtype=torch.bfloat16)
        self.weights = ExpertWeights(gate_up.normal_(0, hidden**-0.5), down.normal_(0, width**-0.5))
        self.router = torch.randn(self.num_routed, hidden, device=DEVICE).bfloat16() * hidden**-0.5
        self.gain = torch.ones(hidden, device=DEVICE)
        self.expert_bytes = 3 * hidden * width * 2

    def inputs(self, rows: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """x and logits, different each time."""
        torch.manual_seed(rows)
        xs = [torch.randn(rows, self.shape[2], device=DEVICE).bfloat16() for _ in range(count)]
        return [(x, torch.randn(rows, self.num_routed, device=DEVICE).bfloat16()) for x in xs]

    def run(self, config: MoeConfig | None) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        return lambda x, logits: moe_triton(x, logits, self.weights, self.routing, config=config)

    def run_fused(self, config: FewConfig, pdl: bool) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        layer = ((self.gain, 1e-6), self.router, None, self.weights, self.routing)
        return lambda x, logits: fused_layer(x, *layer, residual=x, config=config, pdl=pdl)


def microseconds(run: Callable[..., torch.Tensor], inputs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    run(*inputs[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for pair in inputs:
            run(*pair)
    graph.replay()
    times = []
    for _ in range(5):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / len(inputs))
    return sorted(times)[2]


def compile_some(shape: Shape, jobs: list[tuple[int, MoeConfig]]) -> int:
    """Run each kernel once so that Triton's cache on disk holds it."""
    num_experts, top_k, hidden, width = shape
    gate_up = torch.zeros(num_experts, 2 * width, hidden, device=DEVICE, dtype=torch.bfloat16)
    w = ExpertWeights(gate_up, torch.zeros(num_experts, hidden, width, device=DEVICE, dtype=torch.bfloat16))
    for rows, config in jobs:
        x = torch.zeros(rows, hidden, device=DEVICE, dtype=torch.bfloat16)
        logits = torch.zeros(rows, num_experts, device=DEVICE, dtype=torch.bfloat16)
        moe_triton(x, logits, w, Routing(top_k), config=config)
    torch.cuda.synchronize()
    return len(jobs)


def compile_all(shape: Shape, counts: list[int]) -> int:
    """In parallel processes."""
    jobs: dict[MoeConfig, tuple[int, MoeConfig]] = {}
    if min(counts) <= MAX_FEW_ROWS:
        jobs |= {config: (1, config) for config in few_candidates(shape)}
    for rows in counts:
        for config in grouped_candidates(rows, shape):
            jobs.setdefault(config, (16, config))
    workers = max(1, min(14, (os.cpu_count() or 2) - 1))
    todo = list(jobs.values())
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        return sum(pool.map(compile_some, [shape] * workers, [todo[i::workers] for i in range(workers)]))


def best_of(tried: list[tuple[float, MoeConfig]], kind: type) -> list[MoeConfig]:
    """The best of each kernel's candidates together; for tiles, at each height."""
    by_height: dict[int, list[tuple[float, Any]]] = defaultdict(list)
    for us, config in tried:
        if isinstance(config, kind):
            by_height[getattr(config, "block_m", 0)].append((us, config))
    found: list[MoeConfig] = []
    for height, some in by_height.items():
        likely = some[0][1]
        first = min((t for t in some if t[1].down == likely.down), key=lambda t: t[0])[1].gate_up
        second = min((t for t in some if t[1].gate_up == likely.gate_up), key=lambda t: t[0])[1].down
        found.append(GroupedConfig(height, first, second) if height else FewConfig(first, second))
    return found


def measure(layer: Layer, rows: int) -> dict[str, Any]:
    _, top_k, hidden, width = layer.shape
    now = choose(rows, layer.shape)
    candidates: list[MoeConfig] = [*grouped_candidates(rows, layer.shape)]
    if rows <= MAX_FEW_ROWS:
        candidates = [*few_candidates(layer.shape), *candidates]
    guess = microseconds(layer.run(candidates[0]), layer.inputs(rows, 2))
    inputs = layer.inputs(rows, max(2, min(16, int(GRAPH_US / guess))))
    wanted = layer.run(grouped_candidates(rows, layer.shape)[0])(*inputs[0]).float()
    tried: list[tuple[float, MoeConfig]] = []
    worst = 0.0

    def attempt(config: MoeConfig) -> None:
        nonlocal worst
        try:
            got = layer.run(config)(*inputs[0]).float()
            worst = max(worst, float((got - wanted).norm() / wanted.norm()))
            tried.append((microseconds(layer.run(config), inputs), config))
        except Exception as error:  # a candidate that does not fit the device says so, and the others go on
            print(f"  {config}: {type(error).__name__}: {str(error)[:200]}", flush=True)

    for config in candidates:
        attempt(config)
    for config in (*best_of(tried, FewConfig), *best_of(tried, GroupedConfig)):
        if config not in [c for _, c in tried]:
            attempt(config)
    us, best = min(tried, key=lambda t: t[0])
    routed, shared = layer.routing.top_k, layer.routing.shared
    distinct = [len(logits.float().topk(routed).indices.unique()) + shared for _, logits in inputs]
    read = layer.expert_bytes * sum(distinct) / len(distinct)
    by_kind = {
        kind.__name__: min((t for t in tried if isinstance(t[1], kind)), key=lambda t: t[0], default=None)
        for kind in (FewConfig, GroupedConfig)
    }
    return {
        "rows": rows,
        "us": us,
        "gb_per_s": read / us / 1e3,
        "tflops": 6e-6 * rows * top_k * hidden * width / us,
        "best": line_of(best),
        "now": next(((us, line_of(c)) for us, c in tried if c == now), None),
        "best_by_kind": {name: (t[0], line_of(t[1])) for name, t in by_kind.items() if t is not None},
        "key": [rows, *layer.shape],
        "worst_error": worst,
        "tried": [(us, line_of(c)) for us, c in tried],
        "config": best,
    }


def line_of(config: Any) -> str:
    """As it is written in the table, without what is the default."""
    if isinstance(config, (SlabConfig, TileConfig)):
        given = [str(config.block_n), str(config.block_k)]
        others = [f for f in fields(config) if not f.name.startswith("block")]
        given += [f"{f.name}={getattr(config, f.name)}" for f in others if getattr(config, f.name) != f.default]
        return f"{type(config).__name__}({', '.join(given)})"
    parts = ([str(config.block_m)] if isinstance(config, GroupedConfig) else []) + [
        line_of(config.gate_up),
        line_of(config.down),
    ]
    return f"{type(config).__name__}({', '.join(parts)})"


def measure_fused(layer: Layer, rows: int, config: FewConfig) -> dict[str, Any]:
    inputs = layer.inputs(rows, 16)
    times = {pdl: microseconds(layer.run_fused(config, pdl), inputs) for pdl in (False, True)}
    return {"rows": rows, "us": times[True], "us_without_early_launch": times[False], "config": line_of(config)}


def profile(layer: Layer, rows: int, config: MoeConfig) -> dict[str, float]:
    """Microseconds of each kernel, one launch after the other."""
    inputs = layer.inputs(rows, 4)
    run = layer.run(config)
    run(*inputs[0])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as record:
        for pair in inputs:
            run(*pair)
        torch.cuda.synchronize()
    events = [e for e in record.key_averages() if e.device_time_total > 0]
    return {e.key[:40]: e.device_time_total / len(inputs) for e in events}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", default=str(Path(os.environ.get("OUT", ".")) / "moe.json"))
    parser.add_argument("--shape", default=",".join(map(str, QWEN3_30B)))
    parser.add_argument("--shared", type=int, default=0, help="experts that every row has, of those chosen")
    parser.add_argument("--rows", default=",".join(map(str, BUCKETS)))
    parser.add_argument("--quick", action="store_true", help="DeepSeek-V2-Lite with 64, 128 and 256 rows")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.shape, arguments.shared = ",".join(map(str, V2_LITE)), 2
        arguments.rows = ",".join(map(str, QUICK_ROWS))
    counts = [int(rows) for rows in arguments.rows.split(",")]
    num_experts, top_k, hidden, width = map(int, arguments.shape.split(","))
    shape = (num_experts, top_k, hidden, width)
    out = Path(arguments.json)
    began = time.time()
    print(
        f"{compile_all(shape, counts)} configurations compiled in {time.time() - began:.0f} s",
        flush=True,
    )
    prepare_moe(DEVICE)
    layer = Layer(shape, arguments.shared)
    results: list[dict[str, Any]] = []
    fused: list[dict[str, Any]] = []
    profiles: dict[int, dict[str, float]] = {}
    print(f"{'rows':>6} {'us':>8} {'GB/s':>6} {'TFLOP/s':>7}  chosen (few > grouped, us)")
    for rows in counts:
        found = measure(layer, rows)
        best = found.pop("config")
        kinds = " > ".join(f"{us:.1f}" for us, _ in found["best_by_kind"].values())
        print(
            f"{rows:6} {found['us']:8.1f} {found['gb_per_s']:6.0f} {found['tflops']:7.0f}  {found['best']} ({kinds}; "
            f"worst error {found['worst_error']:.4f})",
            flush=True,
        )
        if found["now"] is not None:
            print(f"{'':6} {found['now'][0]:8.1f} us with what is chosen now: {found['now'][1]}", flush=True)
        results.append(found)
        if rows in FUSED_ROWS:
            few = best if isinstance(best, FewConfig) else few_candidates(shape)[0]
            fused.append(measure_fused(layer, rows, few))
            print(f"{'':14}whole layer, fused: {fused[-1]['us']:.1f} us, ", end="")
            print(f"{fused[-1]['us_without_early_launch']:.1f} without early launch", flush=True)
        if rows in PROFILED_ROWS:
            profiles[rows] = profile(layer, rows, best)
            print(f"{'':14}" + ", ".join(f"{name} {us:.1f}" for name, us in profiles[rows].items()), flush=True)
        out.write_text(json.dumps({"shape": shape, "rows": results, "fused": fused, "profiles": profiles}))
    print("lines of moe_table.MEASURED:")
    for found in results:
        print(f"    ({', '.join(map(str, found['key']))}): {found['best']},")
    print(f"{time.time() - began:.0f} s in all")


if __name__ == "__main__":
    main()
