"""Times every bf16 product that this machine has, beside torch's own, for the weights of two small models.

    python -m benchmarks.cpu.linear [--models smollm2] [--rows 1 64] [--output FILE]
    python -m benchmarks.cpu.linear --variant no-prefetch=-DPREFETCH=0 --variant small=-DCHUNK_BYTES=262144

Copies of each weight are taken in turn, more than caches hold, as the layers of a model are. Threads are bound to their
cores. The figure is the best of many calls; GB/s counts the weight alone. A variant is the AMX kernel, or without AMX
the one for few rows, compiled with other flags.
"""

import argparse
import ctypes
import json
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from quire.bench.machine import describe_machine
from quire.kernels import native
from quire.kernels.native.build import library
from quire.platforms import current_platform
from quire.platforms.cpu_facts import cpu_flags
from quire.platforms.cpuid import load_cpuid

SHAPES = {  # (inputs, outputs)
    "smollm2": {"qkv": (576, 960), "o": (576, 576), "gate_up": (576, 3072), "down": (1536, 576), "head": (576, 49152)},
    "qwen3-0.6b": {
        "qkv": (1024, 4096),
        "o": (2048, 1024),
        "gate_up": (1024, 6144),
        "down": (3072, 1024),
        "head": (1024, 151936),
    },
}
ROWS = (1, 4, 16, 64, 128, 512, 1024)
HEAD_ROWS = 64  # a step computes logits of few rows
FILES = ("amx.c", "linear.c", "threads.c")
LESSER = {
    "avx512": ({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}, "-march=skylake-avx512"),
    "avx2": ({"avx2", "fma", "bmi2"}, "-march=haswell"),
    "portable": (set[str](), "-march=x86-64"),
}

Product = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]  # x, packed, outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--threads", type=int, help="default: the cores this process may use")
    parser.add_argument("--weights-mib", type=int, default=256, help="of copies of a weight")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each figure")
    parser.add_argument("--lesser", action="store_true", help="also our kernels for lesser machines")
    parser.add_argument("--variant", action="append", default=[], metavar="NAME=FLAGS")
    parser.add_argument("--output", type=Path, help="write JSON there")
    args = parser.parse_args()
    # In a thread of its own, as in the engine: the main thread is never pinned.
    thread = threading.Thread(target=run, args=(args,))
    thread.start()
    thread.join()


def run(args: argparse.Namespace) -> None:
    platform = current_platform("cpu", args.threads)
    for note in platform.prepare():
        print(note)
    pinned = native.pin_threads(platform.cores_to_pin())
    print(f"{native.describe()}, {torch.get_num_threads()} threads{' pinned' if pinned else ''}")
    print("GFLOP/s (GB/s of weights)")
    ours = products(args)
    results = []
    for model in args.models:
        for name, (k, n) in SHAPES[model].items():
            rows = [m for m in args.rows if name != "head" or m <= HEAD_ROWS]
            for result in measure(ours, k, n, rows, args.weights_mib << 20, args.seconds):
                result = {"model": model, "weight": name, "k": k, "n": n, **result}
                results.append(result)
                print(as_line(result), flush=True)
    if args.output:
        facts = describe_machine(probe=False) | {"kernels": native.describe(), "pinned": pinned, "cpuid": amx_leaves()}
        args.output.write_text(json.dumps({"machine": facts, "results": results}, indent=1) + "\n")


def products(args: argparse.Namespace) -> dict[str, Product]:
    kind = native.linear_kind()
    if kind is None:
        return {}
    found = {kind: product(native.library(), "quire_linear")}
    if native.has_amx():
        found["amx"] = product(native.library(), "quire_linear_amx")
    if args.lesser:
        for name, (needed, flag) in LESSER.items():
            if name not in found and needed <= cpu_flags():
                found[name] = product(library(flag, only=FILES), "quire_linear")
    for variant in args.variant:
        name, _, flags = variant.partition("=")
        made = library(*flags.split(), only=FILES)
        found[name] = product(made, "quire_linear_amx" if native.has_amx() else "quire_linear")
    return found


def product(made: ctypes.CDLL | None, name: str) -> Product:
    assert made is not None, "it did not compile"
    function = made[name]
    function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3

    def multiply(x: torch.Tensor, packed: torch.Tensor, outputs: int) -> torch.Tensor:
        out = torch.empty(len(x), outputs, dtype=torch.bfloat16)
        function(x.data_ptr(), packed.data_ptr(), None, out.data_ptr(), *out.shape, x.shape[1])
        return out

    return multiply


def measure(ours: dict[str, Product], k: int, n: int, rows: list[int], total: int, seconds: float) -> Any:
    copies = max(2, total // (n * k * 2))
    weight = torch.randn(n, k).bfloat16()
    wanted = {m: torch.randn(m, k).bfloat16() for m in rows}
    weights = [weight.clone() for _ in range(copies)]
    packed = [native.pack_linear(weight) for _ in range(copies)] if ours else []
    reordered = onednn_copies(weights)
    for m, x in wanted.items():
        reference = F.linear(x.float(), weight.float())
        paths: dict[str, Callable[[int], torch.Tensor]] = {"torch": lambda i, x=x: F.linear(x, weights[i])}
        if reordered:
            paths["torch packed"] = lambda i, x=x: torch.ops.mkldnn._linear_pointwise(
                x, reordered[i], None, "none", [], ""
            )
        for name, multiply in ours.items():
            paths[name] = lambda i, x=x, multiply=multiply: multiply(x, packed[i], n)
        figures = {}
        for name, call in paths.items():
            error = (call(0).float() - reference).abs().max().item() / reference.abs().max().item()
            assert error < 0.02, f"{name} is wrong at {m} x {k} x {n}: {error}"
            figures[name] = rates(call, copies, 2 * m * n * k, 2 * n * k, seconds)
        yield {"rows": m, "paths": figures}


def onednn_copies(weights: list[torch.Tensor]) -> list[torch.Tensor]:
    try:
        return [torch.ops.mkldnn._reorder_linear_weight(weight, None) for weight in weights]
    except (AttributeError, RuntimeError):
        return []


def rates(call: Callable[[int], Any], copies: int, flops: int, weight_bytes: int, seconds: float) -> dict[str, float]:
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        call(len(times) % copies)
        times.append(time.perf_counter() - start)
    best = min(times)
    return {
        "gflops": round(flops / best / 1e9, 1),
        "gbytes": round(weight_bytes / best / 1e9, 2),
        "best_us": round(best * 1e6, 1),
        "median_us": round(statistics.median(times) * 1e6, 1),
    }


def amx_leaves() -> dict[str, list[int]]:
    cpuid = load_cpuid()
    leaves = ((0, 0), (7, 0), (7, 1), (0x1D, 0), (0x1D, 1))
    return {f"{leaf:#x}.{sub}": list(cpuid(leaf, sub)) for leaf, sub in leaves} if cpuid else {}


def as_line(result: dict[str, Any]) -> str:
    head = f"{result['model']:>10} {result['weight']:>8} {result['k']:>5} x {result['n']:<6} {result['rows']:>5} rows"
    figures = [f"{name} {r['gflops']:.0f} ({r['gbytes']:.1f})" for name, r in result["paths"].items()]
    return f"{head}  " + ", ".join(figures)


if __name__ == "__main__":
    main()
