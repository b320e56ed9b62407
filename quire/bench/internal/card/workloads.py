"""The card's workloads: each is one or a few blocking `generate` calls, and the figures computed from them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quire.bench.common import WARM_UP, timed_generate
from quire.bench.workloads import (
    GPU_UNUSED_TOKEN_IDS,
    Shape,
    Workload,
    cpu_workload,
    gpu_workload,
    random_workload,
    shrunk,
)

if TYPE_CHECKING:
    from quire import LLM

BEST_OF = 3  # for calls of a few milliseconds
LONG_WARM_UP = Shape(requests=64, own=1024, output=32)


@dataclass(frozen=True)
class Outcome:
    """Figures by row, in the row's unit, and the seconds of each underlying call."""

    figures: dict[str, float]
    seconds: dict[str, list[float]]


@dataclass
class Caller:
    """Times calls on one engine. Prompts are drawn before the clock starts."""

    llm: "LLM"
    vocab_size: int
    tiny: bool = False

    def seconds(self, workload: Workload, *, temperature: float = 0.0, keep_cache: bool = False) -> float:
        if not keep_cache:
            self.llm.reset_prefix_cache()
        return timed_generate(self.llm, workload, temperature)

    def sized(self, workload: Workload) -> Workload:
        return shrunk(workload) if self.tiny else workload

    def gpu_workload(self, name: str) -> Workload:
        return self.sized(gpu_workload(name, self.vocab_size))

    def cpu_workload(self, name: str, repetition: int, qwen: bool) -> Workload:
        if self.tiny:  # the fixed prompts have ids that a tiny vocabulary lacks
            shape = Shape(requests=4, own=16, output=1 if name == "prefill" else 4, common=16 * (name == "prefix"))
            return random_workload(name, repetition, shape, self.vocab_size)
        return cpu_workload(name, repetition, qwen=qwen)

    def warm_up(self, long: bool) -> None:
        for shape in (WARM_UP, LONG_WARM_UP) if long else (WARM_UP,):
            drawn = random_workload("warm-up", 0, shape, self.vocab_size - GPU_UNUSED_TOKEN_IDS)
            self.seconds(self.sized(drawn))


def cut(workload: Workload, output: int) -> Workload:
    """The same prompts with `output` tokens each."""
    return replace(workload, output_lens=[output] * len(workload.prompts))


def decode_seconds(to_first: float, to_last: float) -> float:
    return max(to_last - to_first, 1e-9)  # a tiny workload may be all noise


# One H200


def b1(caller: Caller) -> Outcome:
    whole = caller.gpu_workload("b1")
    first = [caller.seconds(cut(whole, 1)) for _ in range(BEST_OF)]
    last = [caller.seconds(whole) for _ in range(BEST_OF)]
    per_token = decode_seconds(min(first), min(last)) / (whole.output_lens[0] - 1)
    return Outcome({"b1_ttft": 1e3 * min(first), "b1_tpot": 1e3 * per_token}, {"to_first": first, "to_last": last})


def nano(caller: Caller) -> Outcome:
    workload = caller.gpu_workload("nano")
    seconds = caller.seconds(workload, temperature=0.6)
    return Outcome({"nano": workload.num_output_tokens / seconds}, {"all": [seconds]})


def nano_greedy(caller: Caller) -> Outcome:
    workload = caller.gpu_workload("nano")
    seconds = caller.seconds(workload)
    return Outcome({"nano_greedy": workload.num_output_tokens / seconds}, {"all": [seconds]})


def t512_128(caller: Caller) -> Outcome:
    workload = caller.gpu_workload("t512_128")
    seconds = caller.seconds(workload)
    return Outcome(
        {"t512_128": (workload.num_prompt_tokens + workload.num_output_tokens) / seconds}, {"all": [seconds]}
    )


def prefill(caller: Caller) -> Outcome:
    workload = caller.gpu_workload("prefill")
    seconds = caller.seconds(workload)
    return Outcome({"prefill": workload.num_prompt_tokens / seconds}, {"all": [seconds]})


def prefix(caller: Caller) -> Outcome:
    workload = caller.gpu_workload("prefix")
    first = caller.seconds(Workload(workload.prompts[:1], [1]))
    seconds = caller.seconds(workload, keep_cache=True)
    return Outcome({"prefix": seconds}, {"prefix_alone": [first], "all": [seconds]})


def ctx6k(caller: Caller) -> Outcome:
    # The prefix cache is reset before each call: with cached prompts the difference would not be decode time alone.
    whole = caller.gpu_workload("ctx6k")
    first = caller.seconds(cut(whole, 1))
    last = caller.seconds(whole)
    per_token = decode_seconds(first, last) / (whole.output_lens[0] - 1)
    return Outcome({"ctx6k": 1e3 * per_token}, {"to_first": [first], "to_last": [last]})


GPU_WORKLOADS: dict[str, Callable[[Caller], Outcome]] = {
    "b1": b1,
    "nano": nano,
    "nano_greedy": nano_greedy,
    "t512_128": t512_128,
    "prefill": prefill,
    "prefix": prefix,
    "ctx6k": ctx6k,
}


# Two CPU cores: fresh prompts for every repetition


def cpu_latency(caller: Caller, repetition: int, qwen: bool) -> Outcome:
    whole = caller.cpu_workload("latency", repetition, qwen)
    first = caller.seconds(cut(whole, 1))
    last = caller.seconds(whole)
    rate = (whole.output_lens[0] - 1) / decode_seconds(first, last)
    return Outcome({"latency_ttft": 1e3 * first, "latency_decode": rate}, {"to_first": [first], "to_last": [last]})


def cpu_throughput(caller: Caller, repetition: int, qwen: bool) -> Outcome:
    workload = caller.cpu_workload("throughput", repetition, qwen)
    seconds = caller.seconds(workload)
    return Outcome({"throughput": workload.num_output_tokens / seconds}, {"all": [seconds]})


def cpu_prefix(caller: Caller, repetition: int, qwen: bool) -> Outcome:
    seconds = caller.seconds(caller.cpu_workload("prefix", repetition, qwen))
    return Outcome({"prefix": seconds}, {"all": [seconds]})


def cpu_prefill(caller: Caller, repetition: int, qwen: bool) -> Outcome:
    workload = caller.cpu_workload("prefill", repetition, qwen)
    seconds = caller.seconds(workload)
    return Outcome({"prefill": workload.num_prompt_tokens / seconds}, {"all": [seconds]})


CPU_WORKLOADS: dict[str, Callable[[Caller, int, bool], Outcome]] = {
    "latency": cpu_latency,
    "throughput": cpu_throughput,
    "prefix": cpu_prefix,
    "prefill": cpu_prefill,
}


def measure(caller: Caller, name: str, repetition: int, *, cpu: bool, qwen: bool) -> Outcome:
    if cpu:
        return CPU_WORKLOADS[name](caller, repetition, qwen)
    return GPU_WORKLOADS[name](caller)


def device_facts(llm: Any) -> dict[str, Any]:
    """The engine's summary and the device's versions, collected in the measured process."""
    import importlib.metadata

    import torch

    core = getattr(llm.llm_engine.client, "core", None)
    # A str: unpickling torch's own version type would make the parent import torch during the measurement.
    facts: dict[str, Any] = {
        "engine": [core.summary.device, core.summary.kv_cache] if core else [],
        "torch": str(torch.__version__),
    }
    try:
        facts["triton"] = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        facts["triton"] = None
    if torch.cuda.is_available():
        facts |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        facts["gpu_memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
    return facts
