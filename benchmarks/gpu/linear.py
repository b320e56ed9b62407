"""Times the library and every candidate kernel for few rows, and prints the lines of quire/kernels/skinny_table.py.

    python -m benchmarks.gpu.linear [--models 0.6B,8B,gpt-oss] [--out DIR]

Other than 0.6B and 8B, models are measured in bfloat16 alone.
Every figure is one launch's share of a CUDA graph of launches over enough copies of the weight to defeat the L2 cache.
fp8 figures include quantizing the activations, except in gemv, which takes them as they are.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from quire.kernels.quantize_fp8 import quantize_fp8
from quire.kernels.rms_norm import rms_norm
from quire.kernels.silu_mul import silu_mul
from quire.kernels.skinny_linear import prepare_skinny_linear, skinny_linear
from quire.kernels.skinny_table import BUCKETS, SkinnyConfig, candidates

SHAPES = {
    "0.6B qkv": (1024, 4096),
    "0.6B o": (2048, 1024),
    "0.6B gate_up": (1024, 6144),
    "0.6B down": (3072, 1024),
    "0.6B head": (1024, 151936),
    "8B qkv": (4096, 6144),
    "8B o": (4096, 4096),
    "8B gate_up": (4096, 28672),
    "8B down": (14336, 4096),
    "8B head": (4096, 128256),
    "gpt-oss qkv": (2880, 5120),
    "gpt-oss o": (4096, 2880),
    "gpt-oss head": (2880, 201088),
}
HEADS = ("0.6B head", "8B head", "gpt-oss head")  # stay unquantized
PDL_SHAPES = ("0.6B qkv", "0.6B o", "0.6B gate_up", "0.6B down", "8B o")
LARGE_ROWS = (256, 2048, 8192)
ROTATED_BYTES = 200 << 20
KEEP_LIBRARY_WITHIN = 0.97  # a kernel of ours must be this much faster
DEVICE = torch.device("cuda", 0)


class Problem:
    """One weight shape in one format, with copies."""

    def __init__(self, itemsize: int, k: int, n: int) -> None:
        self.itemsize, self.k, self.n = itemsize, k, n
        self.bytes = n * k * itemsize
        copies = max(1, min(32, -(-ROTATED_BYTES // self.bytes)))
        self.weights = [torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16) * k**-0.5 for _ in range(copies)]
        self.scale: torch.Tensor | None = None
        if itemsize == 1:
            quantized = [quantize_fp8(weight) for weight in self.weights]
            self.weights, self.scale = [q for q, _ in quantized], quantized[0][1]
        self.launches = max(copies, 8)

    def microseconds(self, run: Callable[[torch.Tensor], torch.Tensor]) -> float:
        run(self.weights[0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(self.launches):
                run(self.weights[i % len(self.weights)])
        graph.replay()
        times = []
        for _ in range(5):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) * 1000 / self.launches)
        return sorted(times)[2]

    def library(self, x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        if self.itemsize == 2:
            return lambda weight: F.linear(x, weight)
        return lambda weight: self._scaled_mm(*quantize_fp8(x), weight)

    def ours(self, x: torch.Tensor, config: SkinnyConfig, **fused: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        if self.itemsize == 2 or config.kind == "gemv":
            return lambda weight: skinny_linear(x, weight, config=config, weight_scale=self.scale, **fused)

        def quantized(weight: torch.Tensor) -> torch.Tensor:
            q, scale = quantize_fp8(x)
            return skinny_linear(
                q, weight, config=config, weight_scale=self.scale, x_scale=scale, out_dtype=x.dtype, **fused
            )

        return quantized

    def _scaled_mm(self, q: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        assert self.scale is not None
        return torch._scaled_mm(
            q,
            weight.t(),
            scale_a=scale[:, None],
            scale_b=self.scale[None, :],
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )


def compile_some(jobs: list[tuple[int, int, int, int, SkinnyConfig]]) -> int:
    """Run each kernel once so that Triton's cache on disk holds it."""
    for itemsize, rows, k, n, config in jobs:
        dtype = torch.bfloat16 if itemsize == 2 else torch.float8_e4m3fn
        x = torch.zeros(rows, k, device=DEVICE, dtype=torch.bfloat16 if config.kind == "gemv" else dtype)
        scales: dict[str, Any] = {}
        if itemsize == 1:
            scales["weight_scale"] = torch.ones(n, device=DEVICE)
            scales["x_scale"] = None if config.kind == "gemv" else torch.ones(rows, device=DEVICE)
        weight = torch.empty(n, k, device=DEVICE, dtype=dtype)
        skinny_linear(x, weight, config=config, out_dtype=torch.bfloat16, **scales)
    torch.cuda.synchronize()
    return len(jobs)


def formats(name: str) -> tuple[int, ...]:
    """Bytes of a weight's elements."""
    return (2, 1) if name not in HEADS and name.startswith(("0.6B", "8B")) else (2,)


def compile_all(names: list[str]) -> int:
    """In parallel processes; kernels that differ only in sizes are compiled once."""
    jobs: dict[tuple[Any, ...], tuple[int, int, int, int, SkinnyConfig]] = {}
    for name in names:
        k, n = SHAPES[name]
        for itemsize in formats(name):
            for rows in BUCKETS:
                for c in candidates(itemsize, rows, k, n):
                    m = rows if c.kind == "gemv" else max(16, rows)
                    key = (itemsize, m, c.kind, c.block_n, c.block_k, c.warps, c.stages, c.splits > 1, k <= c.block_k)
                    jobs.setdefault((*key, k % c.block_k == 0), (itemsize, rows, k, n, c))
    workers = max(1, min(14, (os.cpu_count() or 2) - 1))
    todo = list(jobs.values())
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        return sum(pool.map(compile_some, [todo[i::workers] for i in range(workers)]))


def measure(name: str, itemsize: int) -> list[dict[str, Any]]:
    problem = Problem(itemsize, *SHAPES[name])
    results = []
    for rows in BUCKETS:
        x = torch.randn(rows, problem.k, device=DEVICE, dtype=torch.bfloat16)
        wanted = problem.library(x)(problem.weights[0]).float()
        library = problem.microseconds(problem.library(x))
        tried = []
        for config in candidates(itemsize, rows, problem.k, problem.n):
            run = problem.ours(x, config)
            got = run(problem.weights[0]).float()
            tried.append((problem.microseconds(run), config, float((got - wanted).norm() / wanted.norm())))
        best, config, error = min(tried, key=lambda t: t[0])
        with_pdl = None
        if rows == 1 and name in PDL_SHAPES and itemsize == 2:
            with_pdl = problem.microseconds(problem.ours(x, config, pdl=True))
        results.append(
            {
                "shape": name,
                "bytes": itemsize,
                "rows": rows,
                "k": problem.k,
                "n": problem.n,
                "library_us": library,
                "best_us": best,
                "best": asdict(config),
                "best_pdl_us": with_pdl,
                "worst_error": max(t[2] for t in tried),
                "error": error,
                "tb_per_s": problem.bytes / min(best, library) / 1e6,
                "tried": [{"us": us, **asdict(c)} for us, c, _ in tried],
            }
        )
    return results


def measure_fused(rows: int) -> list[str]:
    """What fusing around the product saves, on the small model's layers."""
    lines = []
    for name in ("0.6B gate_up", "0.6B qkv"):
        problem = Problem(2, *SHAPES[name])
        x = torch.randn(rows, problem.k, device=DEVICE, dtype=torch.bfloat16)
        gain = torch.ones(problem.k, device=DEVICE, dtype=torch.bfloat16)
        config = candidates(2, rows, problem.k, problem.n)[0]
        silu = "gate_up" in name

        def apart(weight: torch.Tensor, x=x, gain=gain, config=config, silu=silu) -> torch.Tensor:
            y = skinny_linear(rms_norm(x, gain, 1e-6), weight, config=config)
            return silu_mul(y) if silu else y

        times = [problem.microseconds(apart)]
        for pdl in (False, True):
            times.append(problem.microseconds(problem.ours(x, config, norm=(gain, 1e-6), silu=silu, pdl=pdl)))
        lines.append(f"{name} at {rows}: norm, product{', silu' if silu else ''} apart {times[0]:.2f} us, ")
        lines[-1] += f"fused {times[1]:.2f}, fused with dependent launch {times[2]:.2f}"
    return lines


def measure_large() -> list[dict[str, Any]]:
    """Prefill: bf16 against fp8 with scales by row and by tensor, without quantizing."""
    results = []
    one = torch.ones((), device=DEVICE)
    for name in ("8B qkv", "8B gate_up", "8B down"):
        k, n = SHAPES[name]
        half, eight = Problem(2, k, n), Problem(1, k, n)
        for rows in LARGE_ROWS:
            x = torch.randn(rows, k, device=DEVICE, dtype=torch.bfloat16)
            q, scale = quantize_fp8(x)

            def by_tensor(w: torch.Tensor, q=q) -> torch.Tensor:
                return torch._scaled_mm(
                    q, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
                )

            times = {
                "bf16": half.microseconds(half.library(x)),
                "by row": eight.microseconds(lambda w, q=q, scale=scale, p=eight: p._scaled_mm(q, scale, w)),
                "by tensor": eight.microseconds(by_tensor),
                "quantize": eight.microseconds(lambda w, x=x: quantize_fp8(x)[0]),
            }
            results.append({"shape": name, "rows": rows, "us": times, "tflops": 2e-6 * rows * k * n / times["by row"]})
    return results


def table_lines(results: list[dict[str, Any]]) -> list[str]:
    lines = []
    for r in results:
        wins = r["best_us"] < KEEP_LIBRARY_WITHIN * r["library_us"]
        given = {k: v for k, v in r["best"].items() if (k, v) not in (("warps", 4), ("stages", 1), ("splits", 1))}
        args = ", ".join(
            f'"{v}"' if k == "kind" else str(v) if k.startswith("block") else f"{k}={v}" for k, v in given.items()
        )
        lines.append(
            f"    ({r['bytes']}, {r['rows']}, {r['k']}, {r['n']}): {f'SkinnyConfig({args})' if wins else None},"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--models", default="0.6B,8B,gpt-oss")
    options = parser.parse_args()
    out, models = Path(options.out), options.models.split(",")
    names = [name for name in SHAPES if name.split()[0] in models]
    began = time.time()
    compiled = compile_all(names)
    print(f"{compiled} kernels compiled in {time.time() - began:.0f} s", flush=True)
    prepare_skinny_linear(DEVICE)
    torch.manual_seed(0)
    results: list[dict[str, Any]] = []
    print("us per launch: library>best (TB/s of the faster), g: gemv, d: dot; columns: rows " + str(BUCKETS))
    for name in names:
        for itemsize in formats(name):
            rows = measure(name, itemsize)
            results += rows
            cells = [
                f"{r['library_us']:.1f}>{r['best_us']:.1f}{r['best']['kind'][0]}({r['tb_per_s']:.1f})" for r in rows
            ]
            print(f"{name:13}{'bf16' if itemsize == 2 else 'fp8 '} " + " ".join(cells), flush=True)
            pdl = [f"; with dependent launch {r['best_pdl_us']:.2f} at 1 row" for r in rows if r["best_pdl_us"]]
            print(f"{'':18}worst error {max(r['worst_error'] for r in rows):.4f}{''.join(pdl)}")
            (out / "linear.json").write_text(json.dumps(results))
    fused = measure_fused(1) if "0.6B" in models else []
    print(*fused, sep="\n")
    large = measure_large() if "8B" in models else []
    for r in large:
        print(f"{r['shape']} x{r['rows']}: " + ", ".join(f"{k} {v:.1f}" for k, v in r["us"].items()) + " us")
    (out / "linear.json").write_text(json.dumps({"few rows": results, "fused": fused, "many rows": large}))
    (out / "measured.txt").write_text("\n".join(table_lines(results)) + "\n")
    print(f"{time.time() - began:.0f} s in all; measured.txt holds the lines for skinny_table.MEASURED")


if __name__ == "__main__":
    main()
