"""Times 8-bit products (fp8 with a scale per block, int8) and prints the lines of quire/kernels/scaled_table.py.

    python -m benchmarks.gpu.scaled_linear [--kinds blocks,int8] [--models 8B,0.6B] [--part few|many|all|experts]

Every figure is one launch's share of a CUDA graph of launches over enough copies of the weight to defeat the L2 cache,
and includes quantizing the rows, except in gemv, which takes them as they are. `channel` is fp8 with a scale per output
as the engine multiplies it, `bf16` the library in bfloat16. `experts` times a layer of Qwen3-30B-A3B in fp8, with
scales per output and per block, beside bfloat16, by the table. A run stops after --seconds with what it has measured;
--out DIR keeps all figures.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.gpu.int_linear import (
    EXPERT_ROWS,
    ROTATED_BYTES,
    SHAPES,
    attempt,
    in_processes,
    microseconds,
)
from benchmarks.gpu.moe import QWEN3_30B
from quire.kernels.moe import Fp8ExpertWeights, ScaledWeight, fused_layer, moe_triton, prepare_moe
from quire.kernels.moe_routing import Routing
from quire.kernels.quantize_fp8 import FP8, quantize_fp8, quantize_int8
from quire.kernels.scaled_linear import _library_blocks, has_library_blocks, scaled_linear
from quire.kernels.scaled_table import BUCKETS, Kind, ScaledConfig, candidates
from quire.kernels.skinny_linear import config_for, prepare_skinny_linear, skinny_linear, skinny_linear_torch
from quire.kernels.skinny_table import SkinnyConfig, for_groups
from quire.kernels.skinny_table import candidates as skinny_candidates
from quire.kernels.triton.scaled_linear import scale_products
from quire.quantization.fp8_linear import Fp8LinearMethod

FEW = (1, 2, 4, 16, 32, 64)
GROUPS = (128, 128)
DEVICE = torch.device("cuda", 0)
DTYPE = torch.bfloat16
Weight = tuple[torch.Tensor, torch.Tensor]  # in 8 bits, its scales


class Problem:
    """One weight shape of one kind, with copies; the same in fp8 with a scale per output, and in bfloat16."""

    def __init__(self, kind: Kind, k: int, n: int, rotated: int = ROTATED_BYTES) -> None:
        self.kind, self.k, self.n = kind, k, n
        count = max(1, min(32, -(-rotated // (k * n))))
        self.wide = [torch.randn(n, k, device=DEVICE, dtype=DTYPE) * k**-0.5 for _ in range(count)]
        self.channel = [self._layer(*quantize_fp8(w)) for w in self.wide]
        self.weights = [self._quantized(w) for w in self.wide]

    @property
    def groups(self) -> tuple[int, int] | None:
        return GROUPS if self.kind == "blocks" else None

    def _quantized(self, w: torch.Tensor) -> Weight:
        if self.kind == "int8":
            return quantize_int8(w)
        scale = (torch.rand(self.n // GROUPS[0], self.k // GROUPS[1], device=DEVICE) + 0.5) * self.k**-0.5
        return (w * self.k**0.5).to(FP8), scale

    def _layer(self, weight: torch.Tensor, scale: torch.Tensor) -> nn.Module:
        layer = nn.Module()
        Fp8LinearMethod().set_weight(layer, weight, scale)
        layer.register_buffer("input_scale", None)
        return layer

    def quantize(self, x: torch.Tensor) -> Weight:
        return quantize_fp8(x, group=GROUPS[1]) if self.kind == "blocks" else quantize_int8(x)

    def few(self, x: torch.Tensor, config: SkinnyConfig) -> Callable[[Weight], torch.Tensor]:
        def run(weight: Weight) -> torch.Tensor:
            kind: dict[str, Any] = {"config": config, "weight_scale": weight[1], "groups": self.groups}
            if config.kind == "gemv":
                return skinny_linear(x, weight[0], **kind)
            q, x_scale = self.quantize(x)
            return skinny_linear(q, weight[0], x_scale=x_scale, out_dtype=DTYPE, **kind)

        return run

    def many(self, x: torch.Tensor, config: ScaledConfig) -> Callable[[Weight], torch.Tensor]:
        def run(weight: Weight) -> torch.Tensor:
            q, x_scale = self.quantize(x)
            return scaled_linear(q, weight[0], x_scale, weight[1], None, DTYPE, self.groups, config)

        return run

    def library(self, x: torch.Tensor) -> Callable[[Weight], torch.Tensor] | None:
        if self.kind == "blocks" and not has_library_blocks(DEVICE):
            return None

        def run(weight: Weight) -> torch.Tensor:
            q, x_scale = self.quantize(x)
            if self.kind == "blocks":
                return _library_blocks(q, weight[0], x_scale, weight[1])
            return scale_products(torch._int_mm(q, weight[0].t()), x_scale, weight[1], None, DTYPE)

        return run

    def wanted(self, x: torch.Tensor) -> torch.Tensor:
        weight, scale = self.weights[0]
        return skinny_linear_torch(x, weight, weight_scale=scale, groups=self.groups, out_dtype=torch.float32)


def compile_some(jobs: list[tuple[Kind, int, int, int]]) -> int:
    """Run every candidate once so that Triton's cache on disk holds it."""
    prepare_skinny_linear(DEVICE)
    for kind, rows, k, n in jobs:
        problem = Problem(kind, k, n, rotated=0)
        x = torch.randn(rows, k, device=DEVICE).to(DTYPE)
        for _, run in options(problem, x):
            attempt(lambda run=run, problem=problem: run(problem.weights[0]))
    torch.cuda.synchronize()
    return len(jobs)


def options(
    problem: Problem, x: torch.Tensor
) -> list[tuple[SkinnyConfig | ScaledConfig | None, Callable[[Weight], torch.Tensor]]]:
    """Candidates; None is the library."""
    rows = len(x)
    if rows <= FEW[-1]:
        configs = dict.fromkeys(
            for_groups(c, GROUPS) if problem.groups else c for c in skinny_candidates(1, rows, problem.k, problem.n)
        )
        return [(config, problem.few(x, config)) for config in configs]
    found: list[tuple[Any, Callable[[Weight], torch.Tensor]]] = [
        (config, problem.many(x, config)) for config in candidates(problem.kind, rows)
    ]
    library = problem.library(x)
    return [*found, (None, library)] if library is not None else found


def measure(problem: Problem, name: str, rows: int) -> dict[str, Any]:
    x = torch.randn(rows, problem.k, device=DEVICE).to(DTYPE)
    wanted, launches = problem.wanted(x), max(8, len(problem.weights))
    tried, worst = [], 0.0
    for config, run in options(problem, x):
        got = attempt(lambda run=run: run(problem.weights[0]).float())
        if got is not None:
            worst = max(worst, float((got - wanted).norm() / wanted.norm()))
            tried.append((microseconds(run, problem.weights, launches), config))
    us, best = min(tried, key=lambda t: t[0])
    method = Fp8LinearMethod()
    channel = microseconds(lambda layer: method.apply(layer, x, None), problem.channel, launches)
    bf16 = microseconds(lambda weight: F.linear(x, weight), problem.wide, launches)
    chosen = config_for(x, problem.weights[0][0]) if rows <= FEW[-1] else None
    if chosen is not None and problem.groups is not None:
        chosen = for_groups(chosen, GROUPS)
    return {
        "kind": problem.kind, "shape": name, "rows": rows, "k": problem.k, "n": problem.n, "us": us,
        "channel_us": channel, "bf16_us": bf16, "library_us": next((t for t, c in tried if c is None), None),
        "table_us": next((t for t, c in tried if c == chosen), None) if chosen is not None else None,
        "best": config_line(best), "worst_error": worst, "tried": [(t, config_line(c)) for t, c in tried],
    }  # fmt: skip


def measure_experts(rows: int) -> dict[str, Any]:
    """A layer with router, norm and residual as a decoder has it: microseconds by layout."""
    num_experts, top_k, hidden, width = QWEN3_30B

    def scaled(n: int, k: int, groups: tuple[int, int] | None) -> ScaledWeight:
        data = torch.randn(num_experts, n, k, device=DEVICE, dtype=DTYPE).to(FP8)
        size = (num_experts, n) if groups is None else (num_experts, n // groups[0], k // groups[1])
        return ScaledWeight(data, (torch.rand(size, device=DEVICE) + 0.5) * k**-0.5, groups)

    torch.manual_seed(rows)
    inputs = [torch.randn(rows, hidden, device=DEVICE).to(DTYPE) for _ in range(16 if rows <= 64 else 4)]
    router = torch.randn(num_experts, hidden, device=DEVICE).to(DTYPE) * hidden**-0.5
    norm = (torch.ones(hidden, device=DEVICE), 1e-6)
    found: dict[str, Any] = {"rows": rows}
    for name, groups in (("channel", None), ("blocks", GROUPS)):
        w = Fp8ExpertWeights(scaled(2 * width, hidden, groups), scaled(hidden, width, groups))
        every: dict[str, Any] = {name: w} | ({"bf16": w.dequantized()} if groups is None else {})
        for called, weights in every.items():

            def run(x: torch.Tensor, weights: Any = weights) -> torch.Tensor:
                if rows <= 4:
                    return fused_layer(x, norm, router, None, weights, Routing(top_k), residual=x)
                return moe_triton(x, F.linear(x, router), weights, Routing(top_k), residual=x)

            found[called] = microseconds(run, inputs, len(inputs))
    return found


def config_line(config: SkinnyConfig | ScaledConfig | None) -> str:
    """As it is written in the table, without what is the default."""
    if config is None:
        return "None"
    defaults = asdict(ScaledConfig(0, 0)) if isinstance(config, ScaledConfig) else asdict(SkinnyConfig("gemv", 0, 0))
    given = [f"{k}={v!r}" for k, v in asdict(config).items() if v != defaults[k]]
    return f"{type(config).__name__}({', '.join(given)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default="blocks,int8")
    parser.add_argument("--models", default="8B")
    parser.add_argument("--part", choices=("few", "many", "all", "experts"), default="all")
    parser.add_argument("--seconds", type=float, default=270)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    begun = time.monotonic()
    if args.part == "experts":
        prepare_moe(DEVICE)
        for rows_of_experts in EXPERT_ROWS:
            if time.monotonic() - begun < args.seconds:
                print(json.dumps(measure_experts(rows_of_experts)), flush=True)
        return
    shapes = {name: shape for name, shape in SHAPES.items() if name.split()[0] in args.models.split(",")}
    rows = [*(FEW if args.part != "many" else ()), *(BUCKETS if args.part != "few" else ())]
    jobs = [(kind, r, k, n) for kind in args.kinds.split(",") for k, n in shapes.values() for r in rows]
    in_processes(compile_some, jobs)
    print(f"compiled after {time.monotonic() - begun:.0f} s", flush=True)
    prepare_skinny_linear(DEVICE)
    found = []
    for kind in args.kinds.split(","):
        for name, (k, n) in shapes.items():
            problem = Problem(kind, k, n)
            for r in rows:
                if time.monotonic() - begun > args.seconds:
                    break
                one = measure(problem, name, r)
                found.append(one)
                print(
                    f"{kind:7} {name:12} {r:5} rows {one['us']:8.1f} us, channel {one['channel_us']:8.1f}, bf16 "
                    f"{one['bf16_us']:8.1f}, library {one['library_us'] or 0:8.1f}, by the table "
                    f"{one['table_us'] or 0:8.1f}, error {one['worst_error']:.4f}: {one['best']}",
                    flush=True,
                )
            del problem
    for one in found:
        if one["rows"] > FEW[-1]:
            print(f"    ({one['kind']!r}, {one['rows']}, {one['k']}, {one['n']}): {one['best']},")
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "scaled_linear.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
