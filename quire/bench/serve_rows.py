"""The serving rows of the reference numbers: their workloads by name, and what vLLM and llama.cpp reached."""

from dataclasses import dataclass, field
from typing import Any

from quire.bench.anchors import LLAMA_CPP, MACHINE, VLLM, Anchor

H200 = "one NVIDIA H200, Qwen3-0.6B with random weights in bf16"
VLLM_H200 = "vLLM 0.26 (bf16)"


@dataclass(frozen=True)
class Row:
    """Random prompts to /v1/completions as token ids, streamed; the model is the caller's part."""

    num_prompts: int
    input_len: int
    output_len: int
    rate: float
    token_id_limit: int
    taken_on: str
    anchors: dict[str, tuple[Anchor, ...]] = field(default_factory=dict)  # by metric

    def flags(self) -> dict[str, Any]:
        return {
            "dataset_name": "random",
            "endpoint": "/v1/completions",
            "num_prompts": self.num_prompts,
            "random_input_len": self.input_len,
            "random_output_len": self.output_len,
            "random_range_ratio": 0.0,
            "random_prefix_len": 0,
            "token_id_limit": self.token_id_limit,
            "request_rate": self.rate,
            "burstiness": 1.0,
            "max_concurrency": None,
            "ignore_eos": True,
            "temperature": 0.0,
        }


def _cpu(rate: float, **values: tuple[float, float]) -> Row:
    return Row(100, 128, 64, rate, 49_000, MACHINE, _by_metric((VLLM, LLAMA_CPP), values))


def _h200(rate: float, **values: tuple[float]) -> Row:
    return Row(512, 512, 128, rate, 151_936 - 1_000, H200, _by_metric((VLLM_H200,), values))


def _by_metric(engines: tuple[str, ...], values: dict[str, Any]) -> dict[str, tuple[Anchor, ...]]:
    return {
        name.replace("_", " "): tuple(Anchor(engine, value) for engine, value in zip(engines, found, strict=True))
        for name, found in values.items()
    }


INF = float("inf")
ROWS = {
    "cpu-at-once": _cpu(INF, output=(693, 211), ttft_p50=(1723, 13430), tpot_p50=(115, 113)),
    "cpu-4": _cpu(4, ttft_p50=(82, 42), ttft_p99=(134, 89), tpot_p50=(34.7, 24.8), tpot_p99=(40.3, 43.9)),
    "h200-at-once": _h200(
        INF,
        output=(12757,),
        ttft_p50=(1154,),
        ttft_p99=(1784,),
        tpot_p50=(29.2,),
        tpot_p99=(30.8,),
        itl_p99=(48,),
    ),
    "h200-32": _h200(
        32, output=(3788,), ttft_p50=(53,), ttft_p99=(104,), tpot_p50=(5.4,), tpot_p99=(10.6,), itl_p99=(30,)
    ),
    "h200-8": _h200(8, output=(986,), ttft_p50=(18,), ttft_p99=(31,), tpot_p50=(2.3,), tpot_p99=(3.2,), itl_p99=(8.5,)),
}
