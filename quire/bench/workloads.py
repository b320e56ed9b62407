"""The fixed workloads behind the reference numbers: random token ids, the same on every machine and day.

The order of the random draws is part of a workload: changing it changes every prompt after it.
"""

import random
import zlib
from dataclasses import dataclass, replace

FIRST_TOKEN_ID = 100  # below it are control tokens in common vocabularies
CPU_TOKEN_ID_LIMIT = 49_000
GPU_UNUSED_TOKEN_IDS = 1_000  # at the end of the vocabulary, where reserved tokens are


@dataclass(frozen=True)
class Shape:
    """Equal requests: `common` tokens shared by all, then `own` tokens each, then `output` generated ones."""

    requests: int
    own: int
    output: int
    common: int = 0


@dataclass(frozen=True)
class Workload:
    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)


CPU_SHAPES = {
    "latency": Shape(requests=1, own=128, output=128),
    "throughput": Shape(requests=64, own=128, output=128),
    "prefix": Shape(requests=64, common=1024, own=32, output=32),
    "prefill": Shape(requests=8, own=1024, output=1),
}
# What differs for the shape of Qwen3-0.6B, whose full throughput workload would take minutes on two cores.
QWEN_SHAPES = {"throughput": replace(CPU_SHAPES["throughput"], requests=16, output=64)}

GPU_SHAPES = {
    "b1": Shape(requests=1, own=128, output=257),
    "t512_128": Shape(requests=1024, own=512, output=128),
    "prefill": Shape(requests=64, own=2048, output=1),
    "prefix": Shape(requests=256, common=4096, own=64, output=64),
    "ctx6k": Shape(requests=32, own=6000, output=129),
}


def cpu_workload(name: str, repetition: int, *, qwen: bool = False) -> Workload:
    """A CPU workload; every repetition has fresh prompts."""
    shapes = CPU_SHAPES | QWEN_SHAPES if qwen else CPU_SHAPES
    return random_workload(name, repetition, _lookup(shapes, name))


def random_workload(name: str, repetition: int, shape: Shape, token_id_limit: int = CPU_TOKEN_ID_LIMIT) -> Workload:
    """Prompts of any shape, drawn like those of the CPU workload `name`."""
    rng = random.Random(zlib.crc32(f"{name}/{repetition}".encode()))
    return _draw(rng, shape, token_id_limit)


def gpu_workload(name: str, vocab_size: int) -> Workload:
    if name == "nano":
        return _nano()
    return _draw(random.Random(0), _lookup(GPU_SHAPES, name), vocab_size - GPU_UNUSED_TOKEN_IDS)


def _draw(rng: random.Random, shape: Shape, token_id_limit: int) -> Workload:
    if token_id_limit <= FIRST_TOKEN_ID:
        raise ValueError(f"token ids are drawn from {FIRST_TOKEN_ID} up; the limit is {token_id_limit}, raise it")

    def ids(count: int) -> list[int]:
        return [rng.randrange(FIRST_TOKEN_ID, token_id_limit) for _ in range(count)]

    common = ids(shape.common)
    prompts = [common + ids(shape.own) for _ in range(shape.requests)]
    return Workload(prompts, [shape.output] * shape.requests)


def _nano() -> Workload:
    """256 requests of uneven lengths; each prompt draws its length, then its ids, and the output lengths come last."""
    rng = random.Random(0)

    def length() -> int:
        return rng.randint(100, 1024)

    prompts = [[rng.randint(0, 10_000) for _ in range(length())] for _ in range(256)]
    return Workload(prompts, [length() for _ in range(256)])


def _lookup(shapes: dict[str, Shape], name: str) -> Shape:
    if name not in shapes:
        raise ValueError(f"unknown workload {name!r}; allowed: {', '.join(shapes)}")
    return shapes[name]
