"""Times of the kernels of latent attention on a GPU, by model shape: microseconds, and the share of its limit.

    python -m benchmarks.gpu.latent [--json FILE] [--shapes V2-Lite,V3] [--tune] [decode] [drafts] [prefix] [prompts]
    python -m benchmarks.gpu.latent --quick

The limit is that of reading what must be read once at 4.1 TB/s, or of computing at 800 TFLOP/s if that takes longer.
Every figure is one layer's share of a CUDA graph of layers whose caches are together more than the L2 holds. `--tune`
times each candidate of the decode kernel's tuning as well. `--quick` times those of the decode kernel and of the
products at 1 to 256 rows of V2-Lite, beside what is chosen now, after compiling all of them side by side.
"""

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from quire.attention.base import Angles, StepInputs
from quire.attention.latent import LatentFeatures, LatentWeights
from quire.attention.latent_triton import TritonLatentBackend
from quire.kernels.triton.latent_decode import Tuning, latent_decode
from quire.kernels.triton.latent_expand import latent_expand
from quire.kernels.triton.latent_prefill import expanded_prefill
from quire.kernels.triton.latent_product import ManyTuning, into_latent, out_of_latent
from quire.kernels.triton.precompile import collecting, compile_all

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # in Triton's interpreter: to try it, not to time
BYTES_PER_US, FLOPS_PER_US = 4.1e6, 800e6
CACHED_BYTES = 256 << 20  # of all layers' caches
PAGE = 16


@dataclass(frozen=True)
class Shape:
    heads: int
    rank: int = 512
    rope: int = 64
    nope: int = 128
    v: int = 128

    @property
    def width(self) -> int:
        return self.rank + self.rope


SHAPES = {
    "V2-Lite": Shape(16),
    "V3": Shape(128),
    "V3/4": Shape(32),
    "MiniCPM3": Shape(40, 256, 32, 64, 64),
    "tiny": Shape(4, 32, 16, 16, 16),
}
# Rows and the length of each: batch 1, `nano`, `t512_128`, `ctx6k`.
DECODE = [(1, 200), (1, 2000), (1, 6000), (8, 1000), (16, 400), (32, 6000), (64, 1000), (256, 560)]
QUICK_ROWS = (1, 16, 64, 128, 256)
QUICK_KEYS = ((512, False), (1024, False), (560, True))  # of a row; or about so many
DECODE_TUNINGS = [
    Tuning(64, 4, 2),
    *(Tuning(32, 4, stages, 2) for stages in (2, 3)),
    Tuning(32, 8, 3, 2),
    Tuning(32, 4, 4),
    Tuning(32, 4, 3, 2, min_keys=256),
]
INTO_TUNINGS = [ManyTuning(64, 128, 128), ManyTuning(64, 64, 128), ManyTuning(128, 64, 128), ManyTuning(32, 128, 128)]
INTO_TUNINGS += [ManyTuning(64, 128, 128, warps=8), ManyTuning(64, 128, 64)]
OUT_TUNINGS = [ManyTuning(16, 128), ManyTuning(32, 128), ManyTuning(32, 128, warps=8), ManyTuning(16, 128, stages=4)]
OUT_TUNINGS += [ManyTuning(16, 64), ManyTuning(32, 64), ManyTuning(64, 64), ManyTuning(16, 128, 128)]
PROMPTS = [(1, 512, 0), (16, 1024, 0), (4, 8192, 0), (1, 2048, 6000), (8, 64, 4096)]  # rows, new, cached


class Batch:
    """Rows of equal length, their pages in random places; a cache for each of several layers. `uneven`: rows of one new
    token, of a quarter of the length to seven."""

    def __init__(
        self,
        shape: Shape,
        rows: int,
        new: int,
        cached: int,
        drafts: bool = False,
        prefix: int = 0,
        uneven: bool = False,
    ) -> None:
        self.shape, self.rows, self.new, self.length = shape, rows, new, new + cached
        self.tokens = rows * new
        longest = self.length * 7 // 4 if uneven else self.length
        pages = -(-longest // PAGE)
        size = (rows * pages + 1) * PAGE * shape.width
        layers = max(1, min(16, CACHED_BYTES // (2 * size))) if DEVICE.type == "cuda" else 1
        kind = {"device": DEVICE, "dtype": torch.bfloat16}
        self.caches = [torch.randn(rows * pages + 1, PAGE, shape.width, **kind) for _ in range(layers)]
        table = (torch.randperm(rows * pages, device=DEVICE).view(rows, pages) + 1).int()
        table[:, : prefix // PAGE] = table[0, : prefix // PAGE]
        heads = shape.heads
        kv_b = [torch.randn(heads * (shape.nope + shape.v), shape.rank, **kind) * 0.05 for _ in range(layers)]
        parts = [each.split((heads * shape.nope, heads * shape.v)) for each in kv_b]
        self.weights = [
            LatentWeights(whole, uk.unflatten(0, (heads, -1)), uv.unflatten(0, (heads, -1)))
            for whole, (uk, uv) in zip(kv_b, parts, strict=True)
        ]
        self.features = LatentFeatures(
            (shape.nope + shape.rope) ** -0.5, shape.rank, shape.nope, shape.rope, shape.v, interleaved=False
        )
        self.q = torch.randn(self.tokens, heads, shape.nope + shape.rope, **kind)
        self.q_nope, self.q_rope = self.q.split((shape.nope, shape.rope), dim=-1)
        self.kv = torch.randn(self.tokens, shape.width, **kind)
        self.norm = (torch.ones(shape.rank, device=DEVICE), 1e-6)
        self.angles = Angles(torch.rand(256, shape.rope, device=DEVICE), torch.zeros(self.tokens, **ints()))
        self.slots = torch.arange(self.tokens, device=DEVICE)
        self.backend = TritonLatentBackend(rows, torch.bfloat16)
        in_step = torch.arange(rows, **ints())
        lens = torch.full((rows,), self.length, **ints())
        if uneven:
            spread = torch.linspace(self.length / 4, longest, rows, device=DEVICE)
            lens = spread[torch.randperm(rows, device=DEVICE)].int()
        self.keys = int(lens.sum())
        if drafts:
            in_step = in_step.repeat_interleave(new)
            lens = (lens[:, None] - torch.arange(new - 1, -1, -1, **ints())).flatten()
        blocks = self.backend.plan_queries(np.full(rows, new))
        self.step = StepInputs(
            in_step, self.tokens, torch.arange(rows + 1, **ints()) * new, lens, drafts or new == 1,
            torch.from_numpy(blocks).to(DEVICE), torch.tensor([prefix], **ints()) if prefix else None, new == 1,
        )  # fmt: skip
        self.table = table

    def attend(self) -> list[Callable[[], object]]:
        metadata = self.backend.build(self.step, self.table, PAGE)
        return [
            lambda cache=cache, weights=weights: self.backend.attend(self.q, weights, cache, metadata, self.features)
            for cache, weights in zip(self.caches, self.weights, strict=True)
        ]

    def decode(self, tuning: Tuning | None = None) -> list[Callable[[], object]]:
        step, latent = self.step, into_latent(self.q_nope, self.weights[0].w_uk)
        queries = max(1, self.tokens // self.rows)
        return [
            lambda cache=cache: latent_decode(
                latent, self.q_rope, cache, step.rows, None, step.seq_lens, self.table, self.features.scale,
                None, queries, step.prefix_len, tuning,
            )
            for cache in self.caches
        ]  # fmt: skip

    def write(self) -> list[Callable[[], object]]:
        return [
            lambda cache=cache: self.backend.write(
                self.q, self.kv, self.norm, self.angles, cache, self.slots, None, self.features
            )
            for cache in self.caches
        ]


def ints() -> dict[str, Any]:
    return {"dtype": torch.int32, "device": DEVICE}


def timed(calls: list[Callable[[], object]]) -> float:
    """Microseconds per call, replayed from a graph so that launches cost nothing."""
    for call in calls:
        call()
    if DEVICE.type == "cpu":
        began = time.perf_counter()
        calls[0]()
        return (time.perf_counter() - began) * 1e6
    torch.cuda.synchronize()
    calls = calls * max(1, 16 // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return triton.testing.do_bench(graph.replay, warmup=5, rep=30, return_mode="median") * 1000 / len(calls)


class Report:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def add(self, shape: str, what: str, case: str, us: float, size: float, flops: float = 0.0, **more: Any) -> None:
        limit = max(size / BYTES_PER_US, flops / FLOPS_PER_US)
        line = {
            "shape": shape,
            "kernel": what,
            "case": case,
            "us": us,
            "bytes": size,
            "flops": flops,
            "limit_us": limit,
        }
        self.lines.append(line | more)
        about = " ".join(f"{key}={value}" for key, value in more.items())
        rates = f"{size / us / 1e6:5.2f} TB/s {flops / us / 1e6:5.0f} TFLOP/s"
        print(
            f"{shape:9} {what:20} {case:16} | {us:9.1f} us | {rates} | {limit / us:5.0%} of the limit {about}",
            flush=True,
        )


def decode_case(report: Report, name: str, batch: Batch, tune: bool) -> None:
    shape, tokens = batch.shape, batch.tokens
    case = f"{batch.rows}x{batch.new}+{batch.length - batch.new}"
    heads, rank, width, item = shape.heads, shape.rank, shape.width, 2
    keys = batch.rows * batch.length * width * item
    per_pair = 2 * heads * (width + rank)
    weights = heads * rank * item
    flops = tokens * batch.length * per_pair
    report.add(name, "write", case, timed(batch.write()), tokens * (2 * width + 2 * heads * shape.rope) * item)
    products = [lambda each=each: into_latent(batch.q_nope, each.w_uk) for each in batch.weights]
    report.add(
        name, "into latent", case, timed(products), weights * shape.nope + tokens * heads * (rank + shape.nope) * 2
    )
    report.add(name, "decode", case, timed(batch.decode()), keys, flops)
    parts, out = batch.decode()[0](), torch.empty(tokens, heads, shape.v, device=DEVICE, dtype=torch.bfloat16)
    products = [lambda each=each: out_of_latent(parts, each.w_uv, out) for each in batch.weights]
    report.add(
        name, "out of latent", case, timed(products), weights * shape.v + tokens * heads * (rank * 4 + shape.v * 2)
    )
    both = weights * (shape.nope + shape.v)
    report.add(name, "attend, all kernels", case, timed(batch.attend()), keys + both, flops)
    if tune:
        for tile, warps, stages, each in itertools.product((64, 128), (4, 8), (1, 2), (1, 2)):
            tuning = Tuning(tile, warps, stages, per_multiprocessor=each)
            try:
                report.add(name, "decode", case, timed(batch.decode(tuning)), keys, flops, **asdict(tuning))
            except triton.runtime.errors.OutOfResources:
                continue


def decode(report: Report, name: str, shape: Shape, tune: bool) -> None:
    for rows, length in DECODE if DEVICE.type == "cuda" else [(2, 40)]:
        decode_case(report, name, Batch(shape, rows, 1, length - 1), tune)


def quick(report: Report, name: str, shape: Shape) -> None:
    cases = [(rows, *keys) for rows in QUICK_ROWS for keys in QUICK_KEYS if rows >= 64 or not keys[1]]
    cases = cases if DEVICE.type == "cuda" else [(70, 40, True)]
    with collecting() as jobs:
        for rows in sorted({rows for rows, _, _ in cases}):
            for _, _, calls in candidates(Batch(shape, rows, 1, 99)):
                calls[0]()
    began = time.perf_counter()
    compile_all(jobs)
    print(f"{len(jobs)} kernels compiled in {time.perf_counter() - began:.0f} s", flush=True)
    for rows, length, uneven in cases:
        batch = Batch(shape, rows, 1, length - 1, uneven=uneven)
        case = f"{rows} of {'about ' * uneven}{length}"
        best: dict[str, tuple[float, object]] = {}
        now: dict[str, float] = {}
        for what, tuning, calls in candidates(batch):
            try:
                us = timed(calls)
            except triton.runtime.errors.OutOfResources:
                continue
            fields = asdict(tuning) if tuning is not None else {}
            report.lines.append({"shape": name, "kernel": what, "case": case, "us": us, "now": tuning is None} | fields)
            if tuning is None:
                now[what] = us
            elif us < best.get(what, (float("inf"), None))[0]:
                best[what] = us, tuning
        for what, us in now.items():
            other = "best {:7.1f} us: {}".format(*best[what]) if what in best else ""
            print(f"{case:18} {what:14} now {us:7.1f} us, {other}", flush=True)
        everything = timed(batch.attend())
        limit = batch.keys * shape.width * 2 / BYTES_PER_US
        report.lines.append(
            {"shape": name, "kernel": "attend, all kernels", "case": case, "us": everything, "now": True}
        )
        print(f"{case:18} all kernels    now {everything:7.1f} us; reading keys takes {limit:.1f} us", flush=True)


def candidates(batch: Batch) -> list[tuple[str, Tuning | ManyTuning | None, list[Callable[[], object]]]]:
    """Kernel, tuning (None: what is chosen now), and its calls for several layers."""
    found: list[tuple[str, Tuning | ManyTuning | None, list[Callable[[], object]]]] = []
    many = batch.rows >= 16
    for into in (None, *INTO_TUNINGS) if many else (None,):
        found.append(
            ("into latent", into, [partial(into_latent, batch.q_nope, w.w_uk, tuning=into) for w in batch.weights])
        )
    found += [("decode", tuning, batch.decode(tuning)) for tuning in (None, *DECODE_TUNINGS)]
    parts = batch.decode()[0]()
    out = torch.empty(batch.tokens, batch.shape.heads, batch.shape.v, device=DEVICE, dtype=torch.bfloat16)
    for out_of in (None, *OUT_TUNINGS) if many else (None,):
        found.append(
            (
                "out of latent",
                out_of,
                [partial(out_of_latent, parts, w.w_uv, out, tuning=out_of) for w in batch.weights],
            )
        )
    return found


def drafts(report: Report, name: str, shape: Shape, tune: bool) -> None:
    for rows, new, cached in [(1, 2, 2000), (1, 4, 2000), (32, 4, 1000)] if DEVICE.type == "cuda" else [(2, 2, 30)]:
        decode_case(report, name, Batch(shape, rows, new, cached, drafts=True), tune)


def prefix(report: Report, name: str, shape: Shape, tune: bool) -> None:
    for rows, shared in [(64, 4096), (256, 4096)] if DEVICE.type == "cuda" else [(2, 32)]:
        batch = Batch(shape, rows, 1, shared + 63, prefix=shared)
        flops = rows * batch.length * 2 * shape.heads * (shape.width + shape.rank)
        size = (shared + rows * 64) * shape.width * 2
        report.add(name, "decode, prefix", f"{rows}x{shared}", timed(batch.decode()), size, flops)


def prompts(report: Report, name: str, shape: Shape, tune: bool) -> None:
    heads, nope, v = shape.heads, shape.nope, shape.v
    for rows, new, cached in PROMPTS if DEVICE.type == "cuda" else [(1, 40, 0), (1, 4, 40)]:
        batch = Batch(shape, rows, new, cached)
        case, length = f"{rows}x{new}+{cached}", new + cached
        pairs = rows * (new * cached + new * (new + 1) / 2)
        size = rows * length * shape.width * 2 + batch.tokens * heads * (nope + shape.rope + v) * 2
        attending = pairs * 2 * heads * (nope + shape.rope + v)
        expanding = rows * length * 2 * heads * shape.rank * (nope + v)
        attend = batch.attend()
        report.add(name, "attend, all kernels", case, timed(attend), size, attending + expanding)
        if cached:
            continue
        metadata = batch.backend.build(batch.step, batch.table, PAGE)
        batch.backend.attend(batch.q, batch.weights[0], batch.caches[0], metadata, batch.features)
        plan, first = metadata.plan, batch.weights[0]
        assert plan is not None
        expand = partial(latent_expand, batch.caches[0], plan, first.w_uk, first.w_uv, shape.rope)
        report.add(name, "expand", case, timed([expand]), size, expanding)
        made, out = expand(), torch.empty(batch.tokens, heads, v, device=DEVICE, dtype=torch.bfloat16)
        step = batch.step
        assert step.query_blocks is not None
        lengths = (step.query_blocks, step.query_start, step.seq_lens)
        for tile, warps, stages in [(64, 8, 3)] + ([(64, 8, 2), (128, 8, 2), (64, 4, 2)] if tune else []):
            scale = batch.features.scale
            call = partial(expanded_prefill, batch.q, out, made, plan, *lengths, scale, tile, warps, stages)
            try:
                tuning = {"tile": tile, "warps": warps, "stages": stages}
                report.add(name, "expanded prefill", case, timed([call]), size, attending, **tuning)
            except triton.runtime.errors.OutOfResources:
                continue


SECTIONS = {"decode": decode, "drafts": drafts, "prefix": prefix, "prompts": prompts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help=f"some of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--json", default=str(Path(os.environ.get("OUT", ".")) / "latent.json"))
    parser.add_argument("--shapes", default="V2-Lite,V3" if DEVICE.type == "cuda" else "tiny")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    report = Report()
    if arguments.quick:
        name = "V2-Lite" if DEVICE.type == "cuda" else "tiny"
        quick(report, name, SHAPES[name])
        Path(arguments.json).write_text(json.dumps(report.lines))
        return
    for name in arguments.shapes.split(","):
        for section in arguments.sections or SECTIONS:
            SECTIONS[section](report, name, SHAPES[name], arguments.tune)
            Path(arguments.json).write_text(json.dumps(report.lines))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
