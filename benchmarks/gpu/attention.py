"""Times of the attention kernels on a GPU by shape and tuning: microseconds, and TB/s or TFLOP/s.

python3 benchmarks/gpu/attention.py [decode] [uneven] [prefill] [prefix]
"""

import itertools
import sys
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

from quire.attention.triton import TritonBackend
from quire.kernels.paged_attention import AttentionFeatures, AttentionShape
from quire.kernels.triton.paged_decode import DecodeWorkspace, Tuning, paged_decode
from quire.kernels.triton.paged_prefill import paged_prefill

DEVICE = torch.device("cuda")
BLOCK, HEAD = 16, 128
FEATURES = AttentionFeatures(HEAD**-0.5)


class Batch:
    """Rows of equal length with their pages in random places; several copies, more than the L2 holds."""

    def __init__(self, rows: int, length: int, heads: int, kv_heads: int, queries: int = 1, shared: int = 0) -> None:
        pages = -(-length // BLOCK)
        shape = (rows * pages + 1, 2, kv_heads, BLOCK, HEAD)
        copies = min(8, max(1, (1 << 30) // (int(np.prod(shape)) * 2)))
        self.caches = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(copies)]
        self.table = (torch.randperm(rows * pages, device=DEVICE).view(rows, pages) + 1).int()
        self.table[:, : shared // BLOCK] = self.table[0, : shared // BLOCK]
        self.rows = torch.arange(rows, device=DEVICE, dtype=torch.int32)
        self.lens = torch.full((rows,), length, device=DEVICE, dtype=torch.int32)
        self.q = torch.randn(rows * queries, heads, HEAD, device=DEVICE, dtype=torch.bfloat16)
        self.out = torch.empty_like(self.q)
        shapes = [AttentionShape(heads, kv_heads, HEAD)]
        self.space = DecodeWorkspace(rows, shapes, DEVICE)
        if rows == 256:  # room for more splits than the product uses
            self.space = DecodeWorkspace(2048, shapes, DEVICE)
        self.bytes = rows * length * kv_heads * HEAD * 4

    def decode(self, **options: object) -> float:
        args = (self.rows, None, self.lens, self.table, self.space, FEATURES)
        calls = [partial(paged_decode, self.q, self.out, cache, *args, **options) for cache in self.caches]
        return timed(calls * max(1, 16 // len(calls)))


def timed(calls: list[Callable[[], object]]) -> float:
    """Microseconds per call, replayed from a graph so that launches cost nothing."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return triton.testing.do_bench(graph.replay, warmup=5, rep=30, return_mode="median") * 1000 / len(calls)


def decode() -> None:
    print("decode: rows, context, heads/kv | tile warps stages programs min_tiles loops | us | TB/s")
    shapes = [(1, 150, 16, 8), (1, 384, 16, 8), (1, 2000, 16, 8), (16, 600, 16, 8), (32, 6000, 16, 8)]
    shapes += [(64, 1000, 32, 8), (256, 560, 16, 8), (256, 150, 16, 8)]
    kinds = [(32, 2, 3), (64, 2, 3), (64, 4, 2), (128, 4, 2), (64, 1, 3), (128, 2, 2)]
    for rows, length, heads, kv_heads in shapes:
        batch = Batch(rows, length, heads, kv_heads)
        least = (1, 2, 4) if rows < 16 else (1,)
        tunings = [
            Tuning(tile, warps, stages, tiles, loops, programs)
            for (tile, warps, stages), tiles, loops, programs in itertools.product(
                kinds, least, (True, False), (528, 1056)
            )
        ]
        found = sorted(((batch.decode(tuning=t), t) for t in tunings), key=lambda pair: pair[0])
        for us, t in found[:3]:
            how = f"{t.tile:3} w{t.warps} s{t.stages} p{t.programs:4} min{t.min_tiles} loops{1 + t.two_loops}"
            print(f"{rows:4} {length:5} {heads}/{kv_heads} | {how} | {us:7.1f} | {batch.bytes / us / 1e6:.2f}")


def uneven() -> None:
    print("decode, 256 rows of 100 to 2000 keys: us | TB/s")
    batch = Batch(256, 2000, 16, 8)
    batch.lens = torch.randint(100, 2000, (256,), device=DEVICE, dtype=torch.int32)
    size = int(batch.lens.sum()) * 8 * HEAD * 4
    for tile, warps, stages in [(64, 2, 3), (64, 4, 2), (128, 4, 2)]:
        for programs, tiles in [(528, 1), (4096, 1), (4096, 4), (8192, 4), (16384, 4)]:
            us = batch.decode(tuning=Tuning(tile, warps, stages, tiles, True, programs))
            print(f"{tile:3} w{warps} s{stages} p{programs:5} min{tiles} | {us:6.1f} | {size / us / 1e6:.2f}")


def prefix() -> None:
    print("decode with a shared prefix of 4096: rows | us | us without")
    length = torch.tensor([4096], device=DEVICE, dtype=torch.int32)
    for rows, heads, kv_heads in [(64, 16, 8), (256, 16, 8), (256, 32, 8)]:
        batch = Batch(rows, 4160, heads, kv_heads, shared=4096)
        print(f"{rows} {heads}/{kv_heads} | {batch.decode(prefix_len=length):.1f} | {batch.decode():.1f}")


def prefill() -> None:
    print("prefill: rows x queries, cached, heads/kv | tile warps stages | us | TFLOP/s")
    for rows, new, cached, heads, kv_heads in [(8, 2048, 0, 16, 8), (32, 512, 0, 16, 8), (128, 64, 4096, 16, 8)]:
        batch = Batch(rows, new + cached, heads, kv_heads, new)
        backend = TritonBackend(rows, [AttentionShape(heads, kv_heads, HEAD)], torch.bfloat16, DEVICE)
        blocks = torch.from_numpy(backend.plan_queries(np.full(rows, new))).to(DEVICE)
        starts = (torch.arange(rows + 1, device=DEVICE) * new).int()
        flops = rows * 4 * heads * HEAD * (new * cached + new * (new + 1) / 2)
        args = (batch.q, batch.out, batch.caches[0], blocks, batch.rows, starts, batch.lens, batch.table, FEATURES)
        found = []
        for tile, warps, stages in itertools.product((64, 128), (4, 8), (2, 3, 4)):
            try:
                call = partial(paged_prefill, *args, tile=tile, warps=warps, stages=stages)
                found.append((timed([call] * 3), tile, warps, stages))
            except triton.runtime.errors.OutOfResources:
                continue
        for us, *tuning in sorted(found)[:2]:
            print(f"{rows}x{new} +{cached} {heads}/{kv_heads} | {tuning} | {us:8.1f} | {flops / us / 1e6:.0f}")
        if cached:
            continue
        k, v = (torch.randn(rows, kv_heads, new, HEAD, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        q = batch.q.view(rows, new, heads, HEAD).transpose(1, 2)
        for kind in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            with sdpa_kernel(kind):
                call = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
                us = timed([call] * 3)
            print(f"    torch, {kind.name}: {us:.1f} us, {flops / us / 1e6:.0f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    for name in sys.argv[1:] or ("decode", "prefix", "prefill"):
        {"decode": decode, "uneven": uneven, "prefix": prefix, "prefill": prefill}[name]()
