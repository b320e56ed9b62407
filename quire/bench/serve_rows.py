"""Presets of `quire bench serve --row`: the serving workloads that are measured regularly, by name."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """Random prompts to /v1/completions as token ids, streamed; the caller chooses the model."""

    num_prompts: int
    input_len: int
    output_len: int
    rate: float
    token_id_limit: int

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


def _cpu(rate: float) -> Row:
    return Row(100, 128, 64, rate, 49_000)


def _h200(rate: float) -> Row:
    return Row(512, 512, 128, rate, 151_936 - 1_000)


INF = float("inf")
ROWS = {
    "cpu-at-once": _cpu(INF),
    "cpu-4": _cpu(4),
    "h200-at-once": _h200(INF),
    "h200-32": _h200(32),
    "h200-8": _h200(8),
}
