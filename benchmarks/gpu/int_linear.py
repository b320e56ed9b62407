"""Times every candidate kernel for weights of 4 and 8 bits, and prints the lines of quire/kernels/int_table.py.

    python -m benchmarks.gpu.int_linear [--part linear|experts|all] [--models 8B,0.6B,gpt-oss] [--bits 4,8] [--out DIR]

Every figure is one launch's share of a CUDA graph of launches over enough copies of the weight to defeat the L2 cache.
`bf16` is cuBLAS with the weight in bfloat16, `apart` the weight dequantized and then cuBLAS. A run stops after
--seconds with what it has measured until then.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu import moe as bf16_moe
from quire.kernels.int_linear import (
    PackedIntWeight,
    dequantize,
    int_linear,
    int_linear_torch,
    pack_int_weight,
    prepare_int_linear,
    stack_experts,
)
from quire.kernels.int_table import BUCKETS, IntConfig, candidates, few_candidates, grouped_candidates
from quire.kernels.moe import IntExpertWeights, fused_layer, moe_triton, prepare_moe
from quire.kernels.moe_routing import Routing
from quire.kernels.moe_table import FewConfig, GroupedConfig, MoeConfig
from quire.kernels.rms_norm import rms_norm

SHAPES = {
    "8B qkv": (4096, 6144),
    "8B o": (4096, 4096),
    "8B gate_up": (4096, 28672),
    "8B down": (14336, 4096),
    "0.6B qkv": (1024, 4096),
    "0.6B o": (2048, 1024),
    "0.6B gate_up": (1024, 6144),
    "0.6B down": (3072, 1024),
    "30B qkv": (2048, 5120),
    "30B o": (4096, 2048),
}
EXPERTS = {"30B": (128, 8, 2048, 768), "gpt-oss": (32, 4, 2880, 2880)}
MXFP4 = ("gpt-oss",)  # models whose experts are 4-bit floats in groups of 32
LAYERS = {"8B": 32, "0.6B": 28, "30B": 48}
EXPERT_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
GROUP = 128
ROTATED_BYTES = 200 << 20
KEEP_LIBRARY_WITHIN = 0.97  # a kernel of ours must be this much faster
DEVICE = torch.device("cuda", 0)
DTYPE = torch.bfloat16


def random_floats(num_experts: int, outputs: int, inputs: int) -> PackedIntWeight:
    """Experts in mxfp4."""

    def one() -> PackedIntWeight:
        codes = torch.randint(16, (outputs, inputs), dtype=torch.uint8, device=DEVICE)
        scales = torch.full((outputs, inputs // 32), 2.0**-8, dtype=torch.bfloat16, device=DEVICE)
        return pack_int_weight(codes, scales, None, 4, DTYPE, "e2m1")

    stacked = stack_experts([one() for _ in range(num_experts)])
    assert stacked is not None
    return stacked


def random_weight(bits: int, *shape: int, zeros: bool = False) -> PackedIntWeight:
    groups = (*shape[:-1], shape[-1] // GROUP)
    codes = torch.randint(1 << bits, shape, dtype=torch.uint8, device=DEVICE)
    scales = (torch.rand(groups, device=DEVICE) + 0.5) * shape[-1] ** -0.5 * 3 / (1 << bits)
    points = torch.randint(1 << bits, groups, device=DEVICE) if zeros else None
    return pack_int_weight(codes, scales.to(DTYPE), points, bits, DTYPE)


def microseconds(run: Callable[[Any], torch.Tensor], over: list[Any], launches: int) -> float:
    run(over[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            run(over[i % len(over)])
    graph.replay()
    times = []
    for _ in range(5):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / launches)
    return sorted(times)[2]


class Problem:
    """One weight shape in one format, with copies, and the same in bfloat16."""

    def __init__(self, bits: int, k: int, n: int, zeros: bool = False) -> None:
        self.bits, self.k, self.n = bits, k, n
        self.packed = self._copies(random_weight(bits, n, k, zeros=zeros))
        self.wide = [dequantize(self.packed[0])]
        self.wide += [self.wide[0].clone() for _ in range(max(0, -(-ROTATED_BYTES // self.wide[0].nbytes) - 1))]
        self.bytes = self.packed[0].nbytes
        self.chunk = self.packed[0].fields * self.packed[0].plane

    def _copies(self, weight: PackedIntWeight) -> list[PackedIntWeight]:
        count = max(1, min(32, -(-ROTATED_BYTES // weight.nbytes)))
        copies = [replace(weight, words=weight.words.clone(), scales=weight.scales.clone()) for _ in range(count - 1)]
        return [weight, *copies]

    def us(self, run: Callable[[PackedIntWeight], torch.Tensor]) -> float:
        return microseconds(run, self.packed, max(8, len(self.packed)))

    def library_us(self, x: torch.Tensor) -> float:
        return microseconds(lambda weight: F.linear(x, weight), self.wide, max(8, len(self.wide)))


@dataclass(frozen=True)
class Job:
    """A kernel to compile: a product of that many rows, plain or with what a decoder layer fuses."""

    bits: int
    rows: int
    k: int
    config: IntConfig
    fused: tuple[str, ...] = ()

    def key(self) -> tuple[Any, ...]:
        """What makes another kernel of it."""
        c, chunk = self.config, 2048 // self.bits
        sizes = (self.k % chunk == 0, self.k // chunk % 16 == 0, c.splits > 1)
        of_norm = (self.rows, min(self.k, 4096)) if "norm" in self.fused else ()
        tile = (c.block_m or max(8, self.rows), c.block_n, c.warps, c.stages, c.sub, c.prescaled)
        return self.bits, tile, sizes, self.fused, of_norm

    def run(self) -> None:
        weight = random_weight(self.bits, 2048, self.k)
        x = torch.randn(self.rows, self.k, device=DEVICE).to(DTYPE)
        norm = (torch.ones(self.k, device=DEVICE), 1e-6) if "norm" in self.fused else None
        residual = torch.zeros(self.rows, 2048, device=DEVICE, dtype=DTYPE) if "residual" in self.fused else None
        silu = "silu" in self.fused
        attempt(lambda: int_linear(x, weight, config=self.config, norm=norm, residual=residual, silu=silu))


def compile_some(jobs: list[Job]) -> int:
    """Run each kernel once so that Triton's cache on disk holds it."""
    prepare_int_linear(DEVICE)
    for job in jobs:
        job.run()
    torch.cuda.synchronize()
    return len(jobs)


def compile_all(shapes: dict[str, tuple[int, int]], every_bits: list[int]) -> int:
    """In parallel processes; kernels that differ only in sizes are compiled once."""
    jobs: list[Job] = []
    for name, (k, n) in shapes.items():
        for bits in every_bits:
            chunk = 2048 // bits
            jobs += [Job(bits, rows, k, c) for rows in BUCKETS for c in candidates(rows, k, n, chunk)]
            silu = ("silu",) if "gate_up" in name else ()
            kinds = [("norm", *silu), silu] if silu or "qkv" in name else [("residual",)]
            for c in candidates(1, k, n // 2 if silu else n, chunk):
                jobs += [Job(bits, rows, k, c, kind) for rows in (1, 2) for kind in kinds]
    return in_processes(compile_some, list({job.key(): job for job in jobs}.values()))


def in_processes(work: Callable[[list[Any]], int], jobs: list[Any]) -> int:
    workers = max(1, min(14, (os.cpu_count() or 2) - 1))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        return sum(pool.map(work, [jobs[i::workers] for i in range(workers)]))


def attempt(run: Callable[[], Any]) -> Any:
    """None for a candidate that does not fit the device, which says so; the others go on."""
    try:
        return run()
    except Exception as error:
        print(f"  {type(error).__name__}: {str(error)[:160]}", flush=True)
        return None


def measure(problem: Problem, name: str, rows: int) -> dict[str, Any]:
    x = torch.randn(rows, problem.k, device=DEVICE).to(DTYPE)
    wanted = F.linear(x.float(), problem.wide[0].float())
    tried: list[tuple[float, IntConfig]] = []
    worst = 0.0
    for config in candidates(rows, problem.k, problem.n, problem.chunk):

        def run(weight: PackedIntWeight, config: IntConfig = config) -> torch.Tensor:
            return int_linear(x, weight, config=config)

        got = attempt(lambda run=run: run(problem.packed[0]).float())
        if got is not None:
            worst = max(worst, float((got - wanted).norm() / wanted.norm()))
            tried.append((problem.us(run), config))
    best, config = min(tried, key=lambda t: t[0])
    apart = problem.us(lambda weight: F.linear(x, dequantize(weight)))
    library = problem.library_us(x)
    return {
        "shape": name,
        "bits": problem.bits,
        "rows": rows,
        "k": problem.k,
        "n": problem.n,
        "us": best,
        "apart_us": apart,
        "bf16_us": library,
        "gb_per_s": problem.bytes / best / 1e3,
        "best": asdict(config) if best < KEEP_LIBRARY_WITHIN * apart else None,
        "worst_error": worst,
        "tried": [{"us": us, **asdict(c)} for us, c in tried],
    }


def measure_fused(problem: Problem, name: str, rows: int) -> dict[str, Any]:
    """Norm, product and what follows it, as a decoder layer of few rows has them: fused, or with the norm apart."""
    x = torch.randn(rows, problem.k, device=DEVICE).to(DTYPE)
    gain = torch.rand(problem.k, device=DEVICE) + 0.5
    silu, has_norm = "gate_up" in name, "gate_up" in name or "qkv" in name
    n = problem.n // 2 if silu else problem.n
    residual = None if has_norm else torch.randn(rows, n, device=DEVICE).to(DTYPE)
    kind: dict[str, Any] = {"silu": silu, "residual": residual}
    norm = (gain, 1e-6) if has_norm else None
    wanted = int_linear_torch(x, problem.packed[0], norm=norm, **kind).float()
    tried, worst = [], 0.0
    for config in candidates(rows, problem.k, n, problem.chunk):

        def inside(weight: PackedIntWeight, config: IntConfig = config) -> torch.Tensor:
            return int_linear(x, weight, config=config, norm=norm, **kind)

        def outside(weight: PackedIntWeight, config: IntConfig = config) -> torch.Tensor:
            return int_linear(rms_norm(x, gain, 1e-6), weight, config=config, **kind)

        got = attempt(lambda inside=inside: inside(problem.packed[0]).float())
        if got is not None:
            worst = max(worst, float((got - wanted).norm() / wanted.norm()))
            tried.append((problem.us(inside), problem.us(outside) if has_norm else None, asdict(config)))
    best = min(tried, key=lambda t: t[0])
    outside_best = min((t for t in tried if t[1] is not None), key=lambda t: t[1], default=None)
    gb_per_s = problem.bytes / best[0] / 1e3
    found = {"shape": name, "bits": problem.bits, "rows": rows, "us": best[0], "gb_per_s": gb_per_s, "best": best[2]}
    found |= {"key": [problem.bits, rows, problem.k, n], "table": config_line(best[2])}
    if outside_best is not None:
        found |= {"norm_apart_us": outside_best[1], "norm_apart_best": outside_best[2]}
        if outside_best[1] < best[0]:
            found["table"] = config_line(outside_best[2] | {"norm_apart": True})
    return found | {"worst_error": worst, "tried": tried}


class Experts:
    def __init__(self, model: str, bits: int) -> None:
        num_experts, self.top_k, hidden, width = self.shape = EXPERTS[model]
        if model in MXFP4:
            made = random_floats(num_experts, 2 * width, hidden), random_floats(num_experts, hidden, width)
            biases = (torch.zeros(num_experts, n, device=DEVICE, dtype=DTYPE) for n in (2 * width, hidden))
            self.weights = IntExpertWeights(*made, *biases, activation="swigluoai")
        else:
            self.weights = IntExpertWeights(
                random_weight(bits, num_experts, 2 * width, hidden), random_weight(bits, num_experts, hidden, width)
            )
        self.wide = self.weights.dequantized()
        self.expert_bytes = (self.weights.gate_up.nbytes + self.weights.down.nbytes) / num_experts
        self.router = torch.randn(num_experts, hidden, device=DEVICE).to(DTYPE) * hidden**-0.5
        self.gain = torch.ones(hidden, device=DEVICE)

    def inputs(self, rows: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """x and logits, different each time."""
        torch.manual_seed(rows)
        xs = [torch.randn(rows, self.shape[2], device=DEVICE).to(DTYPE) for _ in range(count)]
        return [(x, torch.randn(rows, self.shape[0], device=DEVICE).to(DTYPE)) for x in xs]

    def run(self, w: Any, config: MoeConfig | None) -> Callable[[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
        return lambda pair: moe_triton(*pair, w, Routing(self.top_k), config=config)

    def run_fused(
        self, w: Any, config: FewConfig | None
    ) -> Callable[[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
        around = ((self.gain, 1e-6), self.router, None)
        return lambda pair: fused_layer(pair[0], *around, w, Routing(self.top_k), residual=pair[0], config=config)


def compile_experts(jobs: list[tuple[str, int, int, MoeConfig]]) -> int:
    layer = Experts(*jobs[0][:2]) if jobs else None
    for _, _, rows, config in jobs:
        assert layer is not None
        attempt(lambda rows=rows, config=config: layer.run(layer.weights, config)(layer.inputs(rows, 1)[0]))
    torch.cuda.synchronize()
    return len(jobs)


def measure_experts(layer: Experts, bits: int, rows: int) -> dict[str, Any]:
    inputs = layer.inputs(rows, 16 if rows <= 64 else 4)
    options: list[MoeConfig] = [*grouped_candidates(rows, layer.shape)]
    options = [*few_candidates(), *options] if rows <= 8 else options
    wanted = layer.run(layer.wide, None)(inputs[0]).float()
    tried: list[tuple[float, MoeConfig]] = []
    worst = 0.0

    def time_one(config: MoeConfig) -> None:
        nonlocal worst
        got = attempt(lambda: layer.run(layer.weights, config)(inputs[0]).float())
        if got is not None:
            worst = max(worst, float((got - wanted).norm() / wanted.norm()))
            tried.append((microseconds(layer.run(layer.weights, config), inputs, len(inputs)), config))

    for config in options:
        time_one(config)
    for config in (*bf16_moe.best_of(tried, FewConfig), *bf16_moe.best_of(tried, GroupedConfig)):
        if config not in [c for _, c in tried]:
            time_one(config)
    us, best = min(tried, key=lambda t: t[0])
    distinct = [len(logits.float().topk(layer.top_k).indices.unique()) for _, logits in inputs]
    apart = microseconds(lambda pair: layer.run(layer.weights.dequantized(), None)(pair), inputs, len(inputs))
    found = {
        "bits": bits,
        "rows": rows,
        "us": us,
        "apart_us": apart,
        "bf16_us": microseconds(layer.run(layer.wide, None), inputs, len(inputs)),
        "gb_per_s": layer.expert_bytes * sum(distinct) / len(distinct) / us / 1e3,
        "best": bf16_moe.line_of(best) if us < KEEP_LIBRARY_WITHIN * apart else None,
        "key": [bits, rows, *layer.shape],
        "worst_error": worst,
        "tried": [(us, bf16_moe.line_of(c)) for us, c in tried],
    }
    if rows <= 4:
        few = min((t for t in tried if isinstance(t[1], FewConfig)), key=lambda t: t[0])[1]
        assert isinstance(few, FewConfig)
        found["fused_us"] = microseconds(layer.run_fused(layer.weights, few), inputs, len(inputs))
        found["bf16_fused_us"] = microseconds(layer.run_fused(layer.wide, None), inputs, len(inputs))
    return found


def config_line(best: dict[str, Any] | None) -> str:
    """As it is written in the table, without what is the default."""
    if best is None:
        return "None"
    defaults = asdict(IntConfig(0))
    given = [str(best["block_n"])]
    given += [f"{k}={v}" for k, v in best.items() if k != "block_n" and v != defaults[k]]
    return f"IntConfig({', '.join(given)})"


def summary(fused: list[dict[str, Any]]) -> list[str]:
    """The products of one token of each model, added up, with the norm inside or apart, whichever is faster."""
    lines = []
    for model, layers in LAYERS.items():
        for bits in (4, 8):
            own = [r for r in fused if r["shape"].startswith(f"{model} ") and r["bits"] == bits and r["rows"] == 1]
            if own:
                us = sum(min(r["us"], r.get("norm_apart_us", r["us"])) for r in own)
                lines.append(f"{model}, {bits} bits: linears of one token {us * layers / 1e3:.3f} ms")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--part", choices=["linear", "experts", "all"], default="all")
    parser.add_argument("--models", default="8B,0.6B,30B,gpt-oss")
    parser.add_argument("--bits", default="4,8")
    parser.add_argument("--rows", default=",".join(map(str, BUCKETS)))
    parser.add_argument("--seconds", type=float, default=460)
    options = parser.parse_args()
    out, began = Path(options.out), time.time()
    every_bits, rows = [int(b) for b in options.bits.split(",")], [int(r) for r in options.rows.split(",")]
    shapes = {name: s for name, s in SHAPES.items() if name.split()[0] in options.models.split(",")}
    results: dict[str, list[Any]] = {"linear": [], "fused": [], "experts": []}

    def in_time() -> bool:
        (out / "int_linear.json").write_text(json.dumps(results))
        return time.time() - began < options.seconds

    prepare_int_linear(DEVICE)
    prepare_moe(DEVICE)
    torch.manual_seed(0)
    if options.part in ("linear", "all"):
        print(f"{compile_all(shapes, every_bits)} kernels compiled in {time.time() - began:.0f} s", flush=True)
        print("us per launch: ours (GB/s) | dequantized, then cuBLAS | bf16 cuBLAS; columns: rows " + str(rows))
        for bits in every_bits:
            for name, (k, n) in shapes.items():
                problem = Problem(bits, k, n)
                for r in (1, 2):
                    if in_time():
                        results["fused"].append(measure_fused(problem, name, r))
                own = [measure(problem, name, r) for r in rows if in_time()]
                results["linear"] += own
                cells = [f"{r['us']:.1f}({r['gb_per_s']:.0f})|{r['apart_us']:.0f}|{r['bf16_us']:.1f}" for r in own]
                worst = max((r["worst_error"] for r in own), default=0.0)
                print(f"{name:13}{bits} bits " + " ".join(cells) + f" error {worst:.4f}", flush=True)
        for r in results["fused"]:
            apart = f", norm apart {r['norm_apart_us']:.2f}" if "norm_apart_us" in r else ""
            figures = f"{r['us']:.2f} us{apart} ({r['gb_per_s']:.0f} GB/s, error {r['worst_error']:.4f})"
            print(f"{r['shape']:13}{r['bits']} bits x{r['rows']} fused {figures} {config_line(r['best'])}", flush=True)
        print(*summary(results["fused"]), sep="\n", flush=True)
    if options.part in ("experts", "all"):
        chosen = [model for model in EXPERTS if model in options.models.split(",")]
        for model, bits in [(model, bits) for model in chosen for bits in every_bits]:
            if not in_time():
                break
            if model in MXFP4 and bits != 4:
                continue
            jobs = {c: (model, bits, 1, c) for c in few_candidates()}
            jobs |= {c: (model, bits, 16, c) for r in EXPERT_ROWS for c in grouped_candidates(r, EXPERTS[model])}
            start = time.time()
            print(
                f"{in_processes(compile_experts, list(jobs.values()))} compiled in {time.time() - start:.0f} s",
                flush=True,
            )
            layer = Experts(model, bits)
            for r in EXPERT_ROWS:
                if not in_time():
                    break
                found = measure_experts(layer, bits, r)
                results["experts"].append(found)
                fused = f"; whole layer {found['fused_us']:.1f} | {found['bf16_fused_us']:.1f}" if r <= 4 else ""
                print(
                    f"{model} experts {bits} bits x{r}: {found['us']:.1f}({found['gb_per_s']:.0f})|"
                    f"{found['apart_us']:.0f}|{found['bf16_us']:.1f}{fused} "
                    f"error {found['worst_error']:.4f} {found['best']}",
                    flush=True,
                )
    in_time()
    lines = [
        f"    ({r['bits']}, {r['rows']}, {r['k']}, {r['n']}): {config_line(r['best'])}," for r in results["linear"]
    ]
    lines += ["MEASURED_FUSED:"]
    lines += [f"    ({', '.join(map(str, r['key']))}): {r['table']}," for r in results["fused"]]
    lines += ["MEASURED_EXPERTS:"]
    lines += [f"    ({', '.join(map(str, r['key']))}): {r['best']}," for r in results["experts"]]
    (out / "int_measured.txt").write_text("\n".join(lines) + "\n")
    print(f"{time.time() - began:.0f} s in all; int_measured.txt holds the lines for int_table")


if __name__ == "__main__":
    main()
