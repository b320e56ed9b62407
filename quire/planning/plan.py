"""A plan for a model on given GPUs: each legal layout with its memory and speed, and the best, or what would fit."""

from dataclasses import dataclass, replace

from quire.planning.gpus import GPUS, Machine
from quire.planning.memory import Limits, RankMemory, rank_memory
from quire.planning.roofline import Roofline
from quire.planning.shape import ModelShape
from quire.planning.sizes import Layout, legal_layouts, tensor_obstacle
from quire.planning.weight_format import ONLINE, WeightFormat, read_format

MORE_GPUS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
FEWER_ROWS = (512, 256, 128, 64)  # the buffers of sampling grow with them
CLOSE = 0.95  # of the best speed: fewer GPUs a copy are preferred
GOALS = ("throughput", "latency")


@dataclass(frozen=True)
class Load:
    """What speeds are wanted for."""

    batches: tuple[int, ...] = (1, 16, 64, 256)
    prompt_len: int = 1024
    output_len: int = 256
    goal: str = "throughput"

    def __post_init__(self) -> None:
        for name, value in {"prompt_len": self.prompt_len, "output_len": self.output_len}.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if not self.batches or min(self.batches) < 1:
            raise ValueError(f"batch is {list(self.batches)}; allowed: numbers of requests from 1 up, as 1,16,64")
        if self.goal not in GOALS:
            raise ValueError(f"goal is {self.goal!r}; allowed: {', '.join(GOALS)}")


@dataclass(frozen=True)
class Speed:
    """Of one copy with `batch` requests; None where its KV cache does not hold them."""

    batch: int
    token_ms: float | None
    decode_tokens_per_s: float | None
    serving_tokens_per_s: float | None  # with the time of prompts


@dataclass(frozen=True)
class Candidate:
    layout: Layout
    memory: RankMemory
    held: int  # requests of prompt and output that the KV cache holds
    first_token_ms: float
    prompt_tokens_per_s: float
    speeds: tuple[Speed, ...]
    score: float


@dataclass(frozen=True)
class Plan:
    name: str
    shape: ModelShape
    weights: WeightFormat
    machine: Machine
    limits: Limits
    load: Load
    tensor_sizes: tuple[int, ...]
    obstacles: dict[int, str]  # of other tensor-parallel sizes
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    max_model_len: int  # shorter than the limits' where only that fits
    would_fit: tuple[str, ...]
    quantized_while_loading: bool = False

    @property
    def copies(self) -> int:
        return 0 if self.chosen is None else self.machine.count // self.chosen.layout.ranks

    @property
    def command(self) -> str | None:
        if self.chosen is None:
            return None
        words = ["quire serve", self.name]
        layout, limits = self.chosen.layout, self.limits
        words += [layout.flags] if layout.ranks > 1 else []
        words.append(f"--max-model-len {self.max_model_len}")
        defaults = Limits(self.max_model_len)
        for name, flag in FLAGS.items():
            if getattr(limits, name) != getattr(defaults, name):
                words.append(f"{flag} {getattr(limits, name)}")
        if self.quantized_while_loading:
            words.append(f"--quantization {self.weights.name}")
        return " ".join(words)


FLAGS = {
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "block_size": "--block-size",
    "utilization": "--gpu-memory-utilization",
    "cache_dtype": "--kv-cache-dtype",
}


def make_plan(
    name: str,
    shape: ModelShape,
    weights: WeightFormat,
    machine: Machine,
    limits: Limits,
    load: Load,
    *,
    may_shorten: bool = True,
    quantized_while_loading: bool = False,
) -> Plan:
    """`may_shorten`: whether a smaller max_model_len may be recommended."""
    most = machine.count
    obstacles = {n: tensor_obstacle(shape, weights, n) for n in range(1, most + 1)}
    candidates = [
        _candidate(shape, weights, machine, limits, load, layout) for layout in legal_layouts(shape, weights, most)
    ]
    chosen, length = _choose(candidates, limits, load, may_shorten)
    would_fit = () if chosen else tuple(_would_fit(shape, weights, machine, limits, candidates, may_shorten))
    return Plan(
        name=name,
        shape=shape,
        weights=weights,
        machine=machine,
        limits=limits,
        load=load,
        tensor_sizes=tuple(n for n, obstacle in obstacles.items() if obstacle is None),
        obstacles={n: obstacle for n, obstacle in obstacles.items() if obstacle is not None},
        candidates=tuple(candidates),
        chosen=chosen,
        max_model_len=length,
        would_fit=would_fit,
        quantized_while_loading=quantized_while_loading,
    )


def _candidate(
    shape: ModelShape, weights: WeightFormat, machine: Machine, limits: Limits, load: Load, layout: Layout
) -> Candidate:
    memory = rank_memory(shape, weights, layout, machine.gpu.memory, limits)
    length = load.prompt_len + load.output_len
    held = int(
        rank_memory(shape, weights, layout, machine.gpu.memory, replace(limits, max_model_len=length)).capacity_requests
    )
    held = min(held, limits.max_num_seqs)
    line = Roofline(shape, weights, machine.gpu, layout, limits.cache_dtype)
    chunk = limits.max_num_batched_tokens
    speeds = tuple(_speed(line, batch, load, chunk, batch <= held) for batch in load.batches)
    score = 0.0
    if held and load.goal == "latency":
        score = 1 / line.token_seconds(1, load.prompt_len + load.output_len // 2)
    elif held:
        copies = machine.count // layout.ranks
        batch = min(held, -(-max(load.batches) // copies))
        score = copies * line.serving_tokens_per_second(batch, load.prompt_len, load.output_len, chunk)
    return Candidate(
        layout=layout,
        memory=memory,
        held=held,
        first_token_ms=1e3 * line.first_token_seconds(load.prompt_len, chunk),
        prompt_tokens_per_s=line.prompt_tokens_per_second(load.prompt_len, chunk),
        speeds=speeds,
        score=score,
    )


def _speed(line: Roofline, batch: int, load: Load, chunk: int, held: bool) -> Speed:
    if not held:
        return Speed(batch, None, None, None)
    seconds = line.token_seconds(batch, load.prompt_len + load.output_len // 2)
    serving = line.serving_tokens_per_second(batch, load.prompt_len, load.output_len, chunk)
    return Speed(batch, 1e3 * seconds, batch / seconds, serving)


def _choose(candidates: list[Candidate], limits: Limits, load: Load, may_shorten: bool) -> tuple[Candidate | None, int]:
    """The fastest for its goal, of nearly equal ones that with fewest ranks; and its max_model_len."""
    fitting = [each for each in candidates if each.memory.fits and each.held]
    if not fitting and may_shorten:
        fitting = [each for each in candidates if each.held]
    if not fitting:
        return None, limits.max_model_len
    best = max(each.score for each in fitting)
    close = [each for each in fitting if each.score >= CLOSE * best]
    chosen = min(close, key=lambda each: (each.layout.ranks, each.layout.stages, -each.score))
    if chosen.memory.fits:
        return chosen, limits.max_model_len
    return chosen, chosen.memory.capacity_tokens // limits.block_size * limits.block_size


def _fits(shape: ModelShape, weights: WeightFormat, machine: Machine, limits: Limits) -> Layout | None:
    """The layout of all its GPUs with the fewest stages."""
    layouts = [each for each in legal_layouts(shape, weights, machine.count) if each.ranks == machine.count]
    for layout in sorted(layouts, key=lambda each: each.stages):
        if rank_memory(shape, weights, layout, machine.gpu.memory, limits).fits:
            return layout
    return None


def _would_fit(
    shape: ModelShape,
    weights: WeightFormat,
    machine: Machine,
    limits: Limits,
    candidates: list[Candidate],
    may_shorten: bool,
) -> list[str]:
    found = []
    longest = max((each.memory.capacity_tokens for each in candidates), default=0)
    if longest >= limits.block_size and not may_shorten:
        found.append(f"--max-model-len {longest // limits.block_size * limits.block_size} on these GPUs")
    fewer = next((n for n in FEWER_ROWS if _fits(shape, weights, machine, replace(limits, max_num_seqs=n))), None)
    if fewer is not None:
        found.append(f"--max-num-seqs {fewer} on these GPUs")
    staged = False
    for count in (n for n in MORE_GPUS if n > machine.count):
        layout = _fits(shape, weights, replace(machine, count=count), limits)
        if layout is not None and not (staged and layout.stages > 1):
            found.append(f"{count}x{machine.gpu.name} with {layout.flags}")
            staged = True
        if layout is not None and layout.stages == 1:
            break
    larger = sorted((gpu for gpu in GPUS.values() if gpu.memory > machine.gpu.memory), key=lambda gpu: gpu.memory)
    for gpu in larger:
        if _fits(shape, weights, Machine(gpu, machine.count), limits) is not None:
            found.append(f"{machine.count}x{gpu.name}")
            break
    if weights.bits >= 16:
        for name in ONLINE:
            if _fits(shape, read_format({}, name, shape.dtype_bytes), machine, limits) is not None:
                found.append(f"--quantization {name} on these GPUs")
    return found
