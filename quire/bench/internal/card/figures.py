"""The card's rows, its figures, and the table that compares each with other engines and the goals."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.bench.internal.anchors import Bar

ERROR_WIDTH = 100  # of an error in the table; the JSON has the full text


@dataclass(frozen=True)
class Row:
    title: str
    unit: str
    lower_is_better: bool = False


H200_ROWS = {
    "startup_cold": Row("start-up to first token, cold", "s", True),
    "startup_warm": Row("start-up to first token, warm", "s", True),
    "b1_ttft": Row("b1 time to first token", "ms", True),
    "b1_tpot": Row("b1 time per output token", "ms", True),
    "nano": Row("nano, temperature 0.6, output", "tok/s"),
    "nano_greedy": Row("nano, greedy, output", "tok/s"),
    "t512_128": Row("t512_128 total", "tok/s"),
    "prefill": Row("prefill prompt", "tok/s"),
    "prefix": Row("prefix", "s", True),
    "ctx6k": Row("ctx6k time per output token", "ms", True),
}
CPU_ROWS = {
    "startup": Row("start-up to first token", "s", True),
    "latency_ttft": Row("latency: time to first token", "ms", True),
    "latency_decode": Row("latency: decode", "tok/s"),
    "throughput": Row("throughput: output", "tok/s"),
    "prefix": Row("prefix", "s", True),
    "prefill": Row("prefill: prompt", "tok/s"),
}
SERVER_START_UP = Row("server start-up to /health", "s", True)


@dataclass(frozen=True)
class Figure:
    """A value per repetition of one row; reported as the median."""

    row: Row
    values: Sequence[float]
    bar: Bar = field(default_factory=Bar)
    raw: Any = None  # seconds of each call

    @property
    def value(self) -> float:
        return statistics.median(self.values)

    def times_better_than(self, other: float | None) -> float | None:
        """Above 1: ahead of `other`, whether the row is a time or a rate."""
        if other is None:
            return None
        return other / self.value if self.row.lower_is_better else self.value / other

    def reaches(self, goal: float | None) -> bool:
        ratio = self.times_better_than(goal)
        return ratio is not None and ratio >= 1

    @property
    def verdict(self) -> str:
        """The best goal that is reached."""
        if self.bar.must is None and self.bar.moonshot is None:
            return ""
        if self.reaches(self.bar.moonshot):
            return "moonshot"
        return "must" if self.reaches(self.bar.must) else "missed"

    def as_json(self) -> dict[str, Any]:
        bar = self.bar
        return {
            "unit": self.row.unit,
            "value": self.value,
            "values": list(self.values),
            "vllm": bar.vllm,
            "times_vllm": self.times_better_than(bar.vllm),
            **({"llama_cpp": bar.llama_cpp, "llama_cpp_file": bar.llama_cpp_file} if bar.llama_cpp else {}),
            **({"times_llama_cpp": self.times_better_than(bar.llama_cpp)} if bar.llama_cpp else {}),
            "limit": bar.limit,
            "must": bar.must,
            "moonshot": bar.moonshot,
            "verdict": self.verdict,
            "raw": self.raw,
        }


@dataclass
class ModelCard:
    """All results of one model. `notes` hold the rest: device, start-up, profile, elapsed."""

    name: str
    figures: dict[str, Figure] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)  # by workload
    notes: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "figures": {key: figure.as_json() for key, figure in self.figures.items()},
            "errors": self.errors,
            **self.notes,
        }


def table(cards: Sequence[ModelCard]) -> str:
    """One block per model, one line per figure; failures come after the model's figures."""
    llama = any(figure.bar.llama_cpp for card in cards for figure in card.figures.values())
    columns = ["quire", "vLLM", "x vLLM", *(["llama.cpp", "x it"] if llama else []), "limit", "must", "moonshot", ""]
    lines = []
    for card in cards:
        lines.append(_line(card.name, columns))
        lines += [_line(f"  {f.row.title}, {f.row.unit}", _cells(f, llama)) for f in card.figures.values()]
        lines += [f"  {workload}: FAILED: {_short(error)}" for workload, error in card.errors.items()]
    return "\n".join(lines)


def _line(title: str, cells: Sequence[str]) -> str:
    return f"{title:<40}{''.join(f'{cell:>11}' for cell in cells)}".rstrip()


def _cells(figure: Figure, llama: bool) -> list[str]:
    bar = figure.bar
    cells = [_number(figure.value), _number(bar.vllm), _ratio(figure.times_better_than(bar.vllm))]
    if llama:
        q4 = " Q4" if bar.llama_cpp and bar.llama_cpp_file != "bf16" else ""
        cells += [_number(bar.llama_cpp) + q4, _ratio(figure.times_better_than(bar.llama_cpp))]
    return [*cells, _number(bar.limit), _number(bar.must), _number(bar.moonshot), figure.verdict]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} x"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= ERROR_WIDTH else line[: ERROR_WIDTH - 3] + "..."
