"""The C kernels, compiled with sanitizers, on random shapes and buffers of exactly their size; results against torch's.

Tensors come from malloc, which libasan guards, so that a byte read or written beyond one ends the process. AMX is there
in software, whatever the processor has.
"""

import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Self

from tests.fuzz.child import Child

SANITIZED = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DQUIRE_EMULATE_AMX")
SECONDS, START_SECONDS = 60.0, 600.0  # the first start compiles
MEGABYTES = 1 << 30  # libasan's shadow is no memory, but counted as such
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "OMP_NUM_THREADS": "2",
    "OMP_WAIT_POLICY": "passive",
}
# Compiled for less than the processor has, too, but not for the first cases, which tests run.
LEVELS = ("native", "avx2", "portable")
CASES_OF_NATIVE = 200


class KernelsTarget:
    name = "kernels"

    def __enter__(self) -> Self:
        self.children: dict[str, Child] = {}
        return self

    def __exit__(self, *exc: object) -> None:
        for child in self.children.values():
            child.stop()

    def cases(self, rng: random.Random) -> Iterator[bytes]:
        count = 0
        while True:
            count += 1
            level = "native" if count <= CASES_OF_NATIVE else rng.choice(LEVELS)
            kernel = rng.choice(sorted(KERNELS))
            case = {"level": level, "kernel": kernel, "seed": rng.randrange(2**32), "amx": rng.random() < 0.4}
            yield json.dumps(case).encode()

    def check(self, data: bytes) -> None:
        level = json.loads(data)["level"]
        if level not in self.children:
            self.children[level] = SanitizedChild(level)
        self.children[level].check(data)


class SanitizedChild(Child):
    def __init__(self, level: str) -> None:
        super().__init__("tests.fuzz.kernels:check_kernel", seconds=SECONDS, megabytes=MEGABYTES)
        self.changes = ENVIRONMENT | {"LD_PRELOAD": f"{_runtime('libasan.so')} {_runtime('libubsan.so')}"}
        if level != "native":
            self.changes |= {"QUIRE_CPU_ISA": level}
        self.first = json.dumps({"level": level, "kernel": "norms", "seed": 0, "amx": False}).encode()

    def start(self) -> None:
        before = dict(os.environ)
        os.environ.update(self.changes)
        try:
            super().start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        self.seconds = START_SECONDS
        self.check(self.first)
        self.seconds = SECONDS


def _runtime(name: str) -> str:
    compiler = shutil.which("gcc")
    assert compiler is not None, "the kernels' target needs gcc and its sanitizers"
    return subprocess.run(
        [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()


def check_kernel(data: bytes) -> str:
    import torch

    from quire.kernels import native
    from quire.kernels.native import build, latent, moe, quantized

    if SANITIZED[0] not in build.FLAGS:
        build.FLAGS = (*build.FLAGS, *SANITIZED)
        torch.set_num_threads(2)
    case = json.loads(data)
    for module in (native, moe, quantized, latent):
        module.has_amx = lambda: case["amx"] and case["level"] == "native"  # type: ignore[attr-defined]
    torch.manual_seed(case["seed"])
    KERNELS[case["kernel"]](random.Random(case["seed"]))
    return ""


def near(found: Any, expected: Any, tolerance: float) -> None:
    import torch

    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


def some_dtype(rng: random.Random) -> Any:
    import torch

    return rng.choice((torch.float32, torch.bfloat16))


def some_size(rng: random.Random, most: int) -> int:
    """Mostly near the sizes of vectors and panels."""
    near_power = 2 ** rng.randrange(0, most.bit_length()) + rng.choice((-1, 0, 0, 0, 1))
    return max(1, min(most, rng.choice((near_power, rng.randrange(1, most + 1)))))


def check_norms(rng: random.Random) -> None:
    import torch
    import torch.nn.functional as F

    from quire.kernels import native

    rows, width, dtype = some_size(rng, 40), some_size(rng, 700), some_dtype(rng)
    x, weight, bias = torch.randn(rows, width).to(dtype), torch.randn(width), torch.randn(width)
    residual = torch.randn(rows, width).to(dtype) if rng.random() < 0.5 else None
    stream = x if residual is None else x + residual
    tolerance = 1e-4 if dtype is torch.float32 else 6e-2
    if rng.random() < 0.5:
        found = native.rms_norm(x, residual, weight, 1e-5)
        near(found, F.rms_norm(stream.float(), (width,), weight, 1e-5), tolerance)
    else:
        found = native.layer_norm(x, residual, weight, bias, 1e-5)
        near(found, F.layer_norm(stream.float(), (width,), weight, bias, 1e-5), tolerance)


def check_elementwise(rng: random.Random) -> None:
    import torch

    from quire.kernels import native

    rows, width, dtype = some_size(rng, 40), some_size(rng, 700), some_dtype(rng)
    a, b = torch.randn(rows, width).to(dtype), torch.randn(rows, width).to(dtype)
    near(native.add(a, b), a + b, 2e-2)
    table, ids = torch.randn(rows + 3, width).to(dtype), torch.randint(0, rows, (rows,))
    near(native.add_rows(a, table, ids, 3), a + table[ids + 3], 2e-2)
    assert torch.equal(native.argmax(a), a.argmax(-1)) or dtype is torch.bfloat16
    gated = rng.random() < 0.5
    native.activate(torch.cat((a, b), 1).contiguous() if gated else a, rng.randrange(4), gated)


def check_linear(rng: random.Random) -> None:
    import torch

    from quire.kernels import native

    rows, outputs, inputs = some_size(rng, 70), some_size(rng, 200), some_size(rng, 300)
    x, weight = torch.randn(rows, inputs).bfloat16(), torch.randn(outputs, inputs).bfloat16()
    bias = torch.randn(outputs).bfloat16() if rng.random() < 0.5 else None
    found = native.linear(x, native.pack_linear(weight), outputs, bias)
    near(found, torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float()), 2e-1)


def check_quantized(rng: random.Random) -> None:
    import torch

    from quire.kernels.native import quantized

    dtype, parts, inputs = some_dtype(rng), [], 256 * rng.randrange(1, 4)
    for _ in range(rng.randrange(1, 4)):
        name = rng.choice(sorted(quantized.FORMATS))
        kind, outputs = quantized.FORMATS[name], rng.choice((some_size(rng, 80), 32 * rng.randrange(1, 3)))
        blocks = torch.randint(0, 60, (outputs, inputs // kind.elements * kind.nbytes), dtype=torch.uint8)
        half = rng.choice((0, 1, outputs // 2)) if outputs % 2 == 0 else 0
        parts.append(quantized.pack(name, blocks, inputs, None, half))
    x = torch.randn(some_size(rng, 70), inputs).to(dtype)
    fused = quantized.fuse(parts)
    bias = torch.randn(fused.outputs).to(dtype) if rng.random() < 0.5 else None
    found = quantized.linear(x, fused, bias)
    rows = [quantized.lookup(torch.arange(part.outputs), part, torch.float32) for part in parts]
    expected = torch.nn.functional.linear(x.float(), torch.cat(rows), None if bias is None else bias.float())
    scale = float(expected.abs().max()) + 1.0
    near(found.float() / scale, expected / scale, 5e-2)
    weight = torch.randn(some_size(rng, 40), 32 * rng.randrange(1, 9)).to(dtype)
    near(_whole(quantized.quantize("Q8_0", weight)), weight, 5e-2)
    quantized.quantize("Q4_1", weight)


def _whole(packed: Any) -> Any:
    import torch

    from quire.kernels.native import quantized

    return quantized.lookup(torch.arange(packed.outputs), packed, torch.float32)


def check_rope(rng: random.Random) -> None:
    import torch

    from quire.kernels import native
    from quire.kernels.kv_scales import dequantized
    from quire.kernels.rope_and_write import rope_and_write_torch
    from tests.attention.mixes import scaled_cache

    dtype, head_dim = some_dtype(rng), rng.choice((2, 6, 16, 30, 64, 80, 128, 256, 1024))
    kv_heads, block_size, tokens = some_size(rng, 4), some_size(rng, 20), some_size(rng, 20)
    heads, blocks = kv_heads * rng.randrange(1, 4), tokens // block_size + 2
    rotary = 2 * rng.randrange(1, head_dim // 2 + 1)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim).to(dtype)
    norms = (torch.randn(head_dim), torch.randn(head_dim), 1e-5) if rng.random() < 0.5 else None
    table = torch.randn(30, rotary).to(dtype) if rng.random() < 0.8 else None
    positions, slots = torch.randint(0, 30, (tokens,)), torch.randperm(blocks * block_size)[:tokens]
    caches = [torch.zeros(blocks, 2, kv_heads, block_size, head_dim, dtype=dtype) for _ in range(2)]
    found = native.rope_and_write(qkv, heads, norms, table, positions, caches[0], slots)
    expected = rope_and_write_torch(qkv, heads, norms, table, positions, caches[1], slots)
    tolerance = 1e-3 if dtype is torch.float32 else 1.5e-1
    near(found, expected, tolerance)
    near(caches[0], caches[1], tolerance)
    small, scales = scaled_cache(tuple(caches[0].shape), torch.int8, "cpu")
    native.rope_and_write(qkv, heads, norms, table, positions, small, slots, scales)
    kept = dequantized(small, torch.arange(blocks), scales, torch.float32)
    near(kept, caches[1].float(), tolerance + float(caches[1].abs().max()) / 200)


def check_attention(rng: random.Random) -> None:
    import torch

    from quire.kernels import native
    from quire.kernels.paged_attention import paged_attention
    from tests.attention.mixes import FEATURES, filled_cache, make_features, paged_batch

    dtype, head_dim = some_dtype(rng), rng.choice((1, 8, 17, 32, 64, 96, 128, 256))
    kv_heads = rng.choice((1, 1, 2, 3))
    heads = kv_heads * rng.choice((1, 2, 3, 4, 5, 8, 33, 192))
    single = rng.random() < 0.4
    rows = [(rng.randrange(150), 1 if single else some_size(rng, 40)) for _ in range(rng.randrange(1, 14))]
    window = rng.choice((None, None, 1, 5, 64, 1000))
    batch = paged_batch(rows, rng.choice((1, 4, 16, 31)), heads, kv_heads, head_dim, dtype, window)
    q, cache, numbers, starts, lengths, table = batch
    layer_features = make_features(rng.choice(("", *FEATURES)), heads, head_dim**-0.5, window)
    if rng.random() < 0.3:
        cache, scales = filled_cache(cache, torch.int8)
        layer_features = replace(layer_features, kv_scales=scales)
    found = native.attention(q, cache, numbers, starts, lengths, table, layer_features)
    expected = paged_attention(q, cache, numbers, starts, lengths, table, layer_features)
    near(found, expected, 1e-3 if dtype is torch.float32 else 8e-2)


def check_experts(rng: random.Random) -> None:
    import torch

    from quire.kernels.moe_routing import Routing
    from quire.kernels.native.moe import PackedExperts, moe, pack_experts, route

    count, rows = some_size(rng, 9), some_size(rng, 30)
    top_k, hidden, width = rng.randrange(1, count + 1), some_size(rng, 90), some_size(rng, 90)
    logits = torch.randn(rows, count).to(some_dtype(rng))
    if rng.random() < 0.2:
        logits[rng.randrange(rows)] = rng.choice((float("nan"), float("inf"), -float("inf")))
    scores = rng.choice(("softmax", "topk_softmax", "sigmoid", "sqrtsoftplus"))
    bias = torch.randn(count) if rng.random() < 0.5 else None
    weights, experts = route(logits, Routing(top_k, scores, renormalize=rng.random() < 0.5), bias)
    assert int(experts.min()) >= 0 and int(experts.max()) < count
    biases = [torch.randn(count, size).bfloat16() if rng.random() < 0.5 else None for size in (2 * width, hidden)]
    up, down = torch.randn(count, 2 * width, hidden), torch.randn(count, hidden, width)
    packed = PackedExperts(
        pack_experts(up.bfloat16()), pack_experts(down.bfloat16()), *biases, rng.choice(("silu", "swigluoai")),
        hidden, width,
    )  # fmt: skip
    assert moe(torch.randn(rows, hidden).bfloat16(), weights, experts, packed).shape == (rows, hidden)


def check_latent(rng: random.Random) -> None:
    import torch

    from quire.attention.latent import TorchLatentBackend
    from quire.attention.latent_native import NativeLatentBackend
    from tests.attention.test_latent import Step

    unit = rng.choice((1, 32))
    nope, rank, half, v, heads = (some_size(rng, most) for most in (70, 256 // unit, 20, 70, 9))
    rope = 2 * half if unit == 1 else 32 * rng.randrange(1, 3)
    sizes = (nope, rank * unit, rope, v)
    rows = []
    for _ in range(some_size(rng, 5)):
        queries = rng.choice((1, 1, some_size(rng, 40)))
        rows.append((queries, queries + rng.choice((0, some_size(rng, 300), 1100))))
    step = Step(rows, sizes, heads, torch.bfloat16, rng.random() < 0.5)
    *_, cache, expected = step.run(TorchLatentBackend())
    *_, ours, found = step.run(NativeLatentBackend(heads, sizes[1] + rope))
    near(ours, cache, 0.03)
    near(found, expected, 0.06)


KERNELS: dict[str, Callable[[random.Random], None]] = {
    "norms": check_norms,
    "elementwise": check_elementwise,
    "linear": check_linear,
    "quantized": check_quantized,
    "rope": check_rope,
    "attention": check_attention,
    "experts": check_experts,
    "latent": check_latent,
}
