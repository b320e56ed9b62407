"""Times the linear layers of one token in GGUF's types beside W4A16, and prints lines of quire/kernels/int_table.py.

    python -m benchmarks.gpu.gguf_linear [--types Q4_K,Q6_K] [--models 8B] [--rows 1] [--out DIR] [--seconds 170]

As benchmarks/gpu/int_linear.py: every figure is one launch's share of a CUDA graph of launches over enough copies of
the weight to defeat the L2 cache, the best of all candidates. Q4_K must be at least 0.7 as fast as W4A16.
"""

import argparse
import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.int_linear import (
    DEVICE,
    DTYPE,
    LAYERS,
    SHAPES,
    Problem,
    attempt,
    config_line,
    in_processes,
    measure,
    measure_fused,
)
from quire.kernels.int_linear import Kind as CodeKind
from quire.kernels.int_linear import PackedIntWeight, dequantize, int_linear, pack_int_weight, prepare_int_linear
from quire.kernels.int_table import IntConfig, candidates

BAR = 0.7


@dataclass(frozen=True)
class Kind:
    """How a type is packed (quantization/gguf_blocks.py)."""

    bits: int
    group: int
    centres: bool = False
    codes: CodeKind = "int"

    def weight(self, n: int, k: int) -> PackedIntWeight:
        top = 128 if self.codes == "int7" else 1 << self.bits
        codes = torch.randint(top, (n, k), dtype=torch.uint8, device=DEVICE)
        scales = (torch.rand(n, k // self.group, device=DEVICE) + 0.5) * k**-0.5 * 3 / top
        centres = (torch.rand_like(scales) - 0.5) * scales * 8 if self.centres else None
        return pack_int_weight(codes, scales.to(DTYPE), None, self.bits, DTYPE, self.codes, centres=centres)

    @property
    def chunk(self) -> int:
        return 16 // self.bits * min(self.group, 128)


W4A16 = "W4A16"
KINDS = {
    W4A16: Kind(4, 128),
    "Q4_K": Kind(4, 32, centres=True),  # and Q4_1
    "Q4_0": Kind(4, 32),
    "Q6_K": Kind(8, 16, codes="int7"),
    "Q5_K": Kind(8, 32, centres=True, codes="int7"),  # and Q5_1
    "Q5_0": Kind(8, 32, codes="int7"),
    "Q8_0": Kind(8, 32),
}


class TypeProblem(Problem):
    def __init__(self, kind: Kind, k: int, n: int) -> None:
        self.bits, self.k, self.n = kind.bits, k, n
        self.packed = self._copies(kind.weight(n, k))
        self.wide = [dequantize(self.packed[0])]
        self.bytes, self.chunk = self.packed[0].nbytes, kind.chunk


@dataclass(frozen=True)
class TypeJob:
    """A kernel to compile."""

    kind: Kind
    rows: int
    k: int
    config: IntConfig
    fused: tuple[str, ...]

    def key(self) -> tuple[Any, ...]:
        of_norm = (self.rows, min(self.k, 4096)) if "norm" in self.fused else ()
        sizes = (self.k // self.kind.chunk % 16 == 0, self.config.splits > 1)
        return self.kind, replace(self.config, splits=1), sizes, self.fused, of_norm, max(8, self.rows)

    def run(self) -> None:
        n = 2048
        weight, x = self.kind.weight(n, self.k), torch.randn(self.rows, self.k, device=DEVICE).to(DTYPE)
        norm = (torch.ones(self.k, device=DEVICE), 1e-6) if "norm" in self.fused else None
        residual = torch.zeros(self.rows, n, device=DEVICE, dtype=DTYPE) if "residual" in self.fused else None
        silu = "silu" in self.fused
        attempt(lambda: int_linear(x, weight, config=self.config, norm=norm, residual=residual, silu=silu))


def compile_some(jobs: list[TypeJob]) -> int:
    prepare_int_linear(DEVICE)
    for job in jobs:
        job.run()
    torch.cuda.synchronize()
    return len(jobs)


def compile_all(shapes: dict[str, tuple[int, int]], kinds: dict[str, Kind], rows: list[int]) -> int:
    jobs: list[TypeJob] = []
    for name, (k, n) in shapes.items():
        silu = ("silu",) if "gate_up" in name else ()
        fused = [("norm", *silu), silu] if silu or "qkv" in name else [("residual",)]
        for kind in kinds.values():
            jobs += [TypeJob(kind, r, k, c, ()) for r in rows for c in candidates(r, k, n, kind.chunk)]
            for c in candidates(1, k, n // 2 if silu else n, kind.chunk):
                jobs += [TypeJob(kind, 1, k, c, each) for each in fused]
    return in_processes(compile_some, list({job.key(): job for job in jobs}.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--types", default="Q4_K,Q6_K")
    parser.add_argument("--models", default="8B")
    parser.add_argument("--rows", default="1")
    parser.add_argument("--seconds", type=float, default=170)
    options = parser.parse_args()
    out, began, rows = Path(options.out), time.time(), [int(r) for r in options.rows.split(",")]
    shapes = {name: s for name, s in SHAPES.items() if name.split()[0] in options.models.split(",")}
    kinds = {name: KINDS[name] for name in (*options.types.split(","), W4A16)}
    prepare_int_linear(DEVICE)
    torch.manual_seed(0)
    print(f"{compile_all(shapes, kinds, rows)} kernels compiled in {time.time() - began:.0f} s", flush=True)
    results: list[dict[str, Any]] = []
    tokens: dict[tuple[str, str], float] = {}  # model, type -> ms of a token's linears
    lines: dict[str, list[str]] = {"MEASURED_SHORT": [], "MEASURED_SHORT_FUSED": []}
    for type_name, kind in kinds.items():
        for name, (k, n) in shapes.items():
            if time.time() - began > options.seconds:
                print(f"out of time before {type_name}, {name}")
                continue
            problem = TypeProblem(kind, k, n)
            fused = measure_fused(problem, name, 1)
            us = min(fused["us"], fused.get("norm_apart_us", fused["us"]))
            model = name.split()[0]
            tokens[model, type_name] = tokens.get((model, type_name), 0.0) + us * LAYERS[model] / 1e3
            own = [measure(problem, name, r) for r in rows]
            results += [{"type": type_name} | each for each in (fused, *own)]
            cells = " ".join(f"x{r['rows']} {r['us']:.1f}|{r['apart_us']:.1f}|{r['bf16_us']:.1f}" for r in own)
            print(
                f"{type_name:6}{name:12} fused {us:.2f} us ({problem.bytes / us / 1e3:.0f} GB/s, error "
                f"{fused['worst_error']:.4f}); ours|apart|bf16 {cells} {fused['table']}",
                flush=True,
            )
            if type_name != W4A16:
                place = f"{kind.bits}, {kind.chunk}"
                lines["MEASURED_SHORT"] += [
                    f"    ({place}, {r['rows']}, {k}, {n}): {config_line(r['best'])}," for r in own
                ]
                _, *rest = fused["key"]
                lines["MEASURED_SHORT_FUSED"] += [f"    ({place}, {', '.join(map(str, rest))}): {fused['table']},"]
    for (model, type_name), ms in tokens.items():
        if (model, W4A16) not in tokens:
            print(f"{model}: linears of one token {type_name} {ms:.3f} ms")
            continue
        ratio = tokens[model, W4A16] / ms
        bar = f" ({'meets' if ratio >= BAR else 'MISSES'} {BAR})" if type_name == "Q4_K" else ""
        print(f"{model}: linears of one token {type_name} {ms:.3f} ms, {ratio:.2f} of W4A16's rate{bar}")
    (out / "gguf_linear.json").write_text(json.dumps(results))
    text = "".join(f"{name}:\n" + "\n".join(found) + "\n" for name, found in lines.items())
    (out / "gguf_measured.txt").write_text(text)
    print(text + f"{time.time() - began:.0f} s in all")


if __name__ == "__main__":
    main()
